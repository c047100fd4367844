"""What limits of time do, and `soft_fail`: each a story for any way of waiting."""

from __future__ import annotations

from tests.airflow.deployment import Deployment, gated, wait_until
from tests.airflow.semantics.ways import (
    WORK,
    Way,
    assert_done_once_by_one_execution,
    launch,
    launch_and_wait,
    until_all_is_done,
)

EXECUTION_TIMEOUT_S = 8.0  # of the DAGs `timed_…`


def execution_timeout_of_a_wait(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "execution_timeout", variant="timed")

    assert run.ends() == "failed"
    assert "execution_timeout has passed" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def execution_timeout_that_nobody_watches(deployment: Deployment, way: Way) -> None:
    run = launch_and_wait(deployment, way, "execution_timeout", variant="timed")
    age_s = deployment.repository.reading.age_s
    job_execution_id = run.execution().job_execution_id

    wait_until(lambda: age_s(job_execution_id) > 2 * EXECUTION_TIMEOUT_S, f"{run.run_id} is late")
    assert run.execution().status.value == "STARTED"

    until_all_is_done(run, way)
    assert_done_once_by_one_execution(run)


def execution_timeout_of_a_plan(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "execution_timeout", variant="timed")

    assert run.ends() == "failed"
    assert "AirflowTaskTimeout" in run.log(WORK)
    assert run.executions() == []


def timeout_of_an_operator(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "timeout", variant="impatient")

    assert run.ends() == "failed"
    assert run.task(WORK)["try_number"] == 1
    assert "deadline" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def timeout_of_a_plan(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "timeout", variant="impatient")

    assert run.ends() == "failed"
    assert (run.state(WORK), run.state("wait")) == ("success", "failed")
    assert "deadline" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def timeout_of_a_sensor(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "timeout", variant="impatient")

    assert run.ends() == "failed"
    assert run.task(WORK)["try_number"] == 1
    assert "timed out" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def soft_timeout_of_a_sensor(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "soft_timeout", variant="impatient_soft")

    run.ends()
    assert run.state(WORK) == "skipped"
    assert "timed out" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def soft_fail_over_failed_partitions(deployment: Deployment, way: Way) -> None:
    run = launch(deployment, way, "soft_fail", gated(2, fails=1), variant="soft")
    run.wait_for_claims(2)
    run.open()

    assert run.ends() == "failed"
    assert run.state(WORK) == "failed"
    assert run.execution().status.value == "FAILED"
