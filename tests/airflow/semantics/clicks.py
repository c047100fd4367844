"""What a person's clicks do, and Airflow's own retry: each a story for any way of waiting."""

from __future__ import annotations

import re

import pytest

from airflow_dbpartition.demo.airflow_api import AirflowApiError
from airflow_dbpartition.domain import JobExecution
from tests.airflow.deployment import Deployment, Run, wait_until
from tests.airflow.semantics.ways import (
    PLANNING,
    WORK,
    Way,
    assert_done_once_by_one_execution,
    launch,
    launch_and_wait,
    until_all_is_done,
    until_it_waits,
    until_planning,
)

ONE_BROKEN = {"good": {}, "broken": {"fails": 1}}
BY_A_PERSON = re.compile(r"was marked \w+ in Airflow|was killed in Airflow")


def assert_stopped_by_a_person(run: Run) -> None:
    """No partition has done its work, none is left, and the execution says who it was."""
    stopped = run.wait_for_status("STOPPED")
    assert BY_A_PERSON.search(str(stopped.exit_message))
    assert run.counts(stopped) == {"STOPPED": 2}
    assert run.done() == {}


def assert_restarted(run: Run) -> None:
    """Of two partitions one had failed: only that one was begun again, in the same generation."""
    first, second = run.executions()
    assert (first.status.value, second.status.value) == ("FAILED", "COMPLETED")
    assert (first.generation, second.generation) == (1, 1)
    assert run.begun() == {"good": 1, "broken": 2}
    assert run.done() == {"good": 1, "broken": 1}


def latest_of(run: Run, count: int, status: str) -> JobExecution:
    """Wait until so many executions have been launched, and the last has a status."""

    def find() -> JobExecution | None:
        executions = run.executions()
        return executions[-1] if len(executions) == count and executions[-1].status.value == status else None

    return wait_until(find, f"execution number {count} of {run.run_id} is {status}")


# --- retry and clear -----------------------------------------------------------------------------------------------


def retry_after_a_failure(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "retry", ONE_BROKEN, variant="retrying")

    assert run.ends() == "success"
    assert run.task(WORK)["try_number"] == 2
    assert_restarted(run)
    assert run.xcom(WORK)["partitions"]["completed"] == 2


def clear_of_a_completed_operator(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "clear_completed", {"a": {}, "b": {}})
    assert run.ends() == "success"
    run.wait_for_status("COMPLETED")

    run.clear(WORK)

    assert run.ends() == "success"
    second = latest_of(run, 2, "COMPLETED")
    first = run.executions()[0]
    assert (first.generation, second.generation) == (1, 2)
    assert first.job_instance_id != second.job_instance_id
    assert run.done() == {"a": 2, "b": 2}


def clear_of_a_sensor_that_has_succeeded(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "clear_completed", {"a": {}, "b": {}})
    assert run.ends() == "success"
    before = run.xcom(WORK)

    run.clear(WORK)

    assert run.ends() == "success"
    assert run.task(WORK)["try_number"] == 2
    assert run.xcom(WORK) == before
    assert run.execution().generation == 1
    assert run.begun() == {"a": 1, "b": 1}


def clear_of_what_has_failed(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "clear_failed", ONE_BROKEN)
    assert run.ends() == ("success" if way is PLANNING else "failed")
    run.wait_for_status("FAILED")

    run.clear(WORK)

    assert run.ends() == "success"
    latest_of(run, 2, "COMPLETED")
    assert_restarted(run)


def clear_of_the_operator_with_its_sensor(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "clear_downstream", {"a": {}})
    assert run.ends() == "success"
    before = run.xcom(WORK)["job_execution_id"]

    run.clear("plan", include_downstream=True)

    assert run.ends() == "success"
    first, second = run.executions()
    assert (first.job_execution_id, second.generation) == (before, 2)
    assert run.xcom(WORK)["job_execution_id"] == run.xcom("plan") == second.job_execution_id
    assert run.done() == {"a": 2}


def clear_while_it_waits(deployment: Deployment, way: Way) -> None:
    """Airflow may run the new try before or after the old one's on_kill: both must end well."""
    run = launch_and_wait(deployment, way, "clear_waiting")
    before = run.execution().owner_token

    run.clear(WORK)
    until_it_waits(run, way, try_number=2)
    until_all_is_done(run, way)

    assert run.executions()[-1].owner_token not in (None, before)
    assert {execution.generation for execution in run.executions()} == {1}
    assert run.done() == {"p0": 1, "p1": 1}


def clear_of_a_plan_whose_work_runs(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "clear_waiting")

    run.clear(WORK)
    assert run.ends() == "success"
    assert run.execution().status.value == "STARTED"
    assert "attached to job execution" in run.log(WORK, try_number=2)

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def clear_while_it_plans(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "clear_planning", variant="held")
    until_planning(run)

    run.clear(WORK)
    until_planning(run, times=2)
    assert run.executions() == []
    run.let_plan()

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


# --- marks ---------------------------------------------------------------------------------------------------------


def ended_as(way: Way) -> str:
    """The state of a run whose task has been marked failed: Airflow judges no run that has ended a second time."""
    return "success" if way is PLANNING else "failed"


def mark_failed_while_it_waits(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "mark_failed", variant="retrying")

    run.mark_failed(WORK)

    assert_stopped_by_a_person(run)
    assert run.ends() == ended_as(way)
    assert (run.state(WORK), run.task(WORK)["try_number"]) == ("failed", 1)


def mark_the_operator_failed_while_its_sensor_waits(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "mark_plan_failed")

    run.mark_failed("plan")
    if way.waits_in == "process":
        assert_stopped_by_a_person(run)
    else:
        if way.waits_in == "schedule":
            run.wait_for(WORK, "upstream_failed")
        assert run.execution().status.value == "STARTED"
        run.open()
        run.wait_for_status("COMPLETED")
        assert_done_once_by_one_execution(run)

    run.wait_for(WORK, "upstream_failed")
    assert run.ends() == "failed"


def mark_failed_and_clear_later(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "mark_and_clear")
    run.mark_failed(WORK)
    assert_stopped_by_a_person(run)
    assert run.ends() == ended_as(way)

    run.open()
    run.clear(WORK)

    assert run.ends() == "success"
    latest_of(run, 2, "COMPLETED")
    assert [execution.generation for execution in run.executions()] == [1, 1]
    assert run.done() == {"p0": 1, "p1": 1}


def mark_success_while_it_waits(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "mark_success")

    run.mark(WORK, "success")

    assert_stopped_by_a_person(run)
    assert run.ends() == "success"
    with pytest.raises(AirflowApiError, match="404"):  # the state is the person's; the task itself has said nothing
        run.xcom(WORK)


def mark_success_of_a_plan_whose_work_runs(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "mark_success")

    with pytest.raises(AirflowApiError, match="already in success state"):
        run.mark(WORK, "success")

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def mark_the_run_failed(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "run_failed", variant="retrying")

    run.mark_run("failed")

    assert_stopped_by_a_person(run)
    assert (run.state(WORK), run.task(WORK)["try_number"]) == ("failed", 1)


def mark_the_run_of_a_plan_failed(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "run_failed")

    run.mark_run("failed")
    assert run.ends() == "failed"
    assert run.state(WORK) == "success"
    run.open()

    run.wait_for_status("COMPLETED")
    assert_done_once_by_one_execution(run)


# --- paused --------------------------------------------------------------------------------------------------------


def pause_while_it_waits(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "paused", variant="paused")

    deployment.api.pause(run.dag_id)
    run.open()
    run.wait_for_status("COMPLETED")
    if way.waits_in == "process":
        run.wait_for(WORK, "success")
    elif way is not PLANNING:
        assert run.state(WORK) in {"deferred", "scheduled", "up_for_reschedule"}
    deployment.api.unpause(run.dag_id)

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)
