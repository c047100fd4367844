"""What only one test at a time may do to the shared Airflow; and what must hold after all stories."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.airflow import steps_of_stories
from tests.airflow.deployment import Deployment, gated

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_triggerer_stops_nothing_and_its_successor_ends_the_wait(deployment: Deployment) -> None:
    run = deployment.run("waiting_operator", "triggerer_killed", gated(2))
    run.wait_for_claims(2)
    run.wait_for_trigger("work")

    deployment.airflow.kill("triggerer")
    deployment.airflow.start(["triggerer"])
    deployment.airflow.wait_until_healthy()
    assert run.execution().status.value == "STARTED"
    run.open()

    assert run.ends() == "success"
    assert run.execution().status.value == "COMPLETED"
    assert run.begun() == {"p0": 1, "p1": 1}


def test_a_task_marked_failed_while_no_triggerer_runs_is_stopped_by_the_next(deployment: Deployment) -> None:
    run = deployment.run("waiting_operator", "triggerer_away", gated(2))
    run.wait_for_claims(2)
    run.wait_for_trigger("work")

    deployment.airflow.kill("triggerer")
    run.mark_failed("work")
    deployment.airflow.start(["triggerer"])
    deployment.airflow.wait_until_healthy()

    assert "killed in Airflow while deferred" in str(run.wait_for_status("STOPPED").exit_message)
    assert run.done() == {}


def test_a_terminated_triggerer_stops_nothing_either(deployment: Deployment) -> None:
    run = deployment.run("waiting_operator", "triggerer_drained", gated(2))
    run.wait_for_claims(2)
    run.wait_for_trigger("work")

    deployment.airflow.restart("triggerer")
    assert run.execution().status.value == "STARTED"
    run.open()

    assert run.ends() == "success"
    assert run.begun() == {"p0": 1, "p1": 1}


def test_no_partition_was_ever_done_twice_and_nothing_succeeded_over_a_failure(deployment: Deployment) -> None:
    """The last of all, over everything that the other tests have left in the database."""
    assert [key for key, times in Counter(deployment.rows(steps_of_stories.done)).items() if times > 1] == []
    reading = deployment.repository.reading
    for execution in reading.recent(limit=1000):
        ended = {str(row.status) for row in reading.partitions(execution.job_execution_id)}
        if execution.status.value == "COMPLETED":
            assert ended <= {"COMPLETED"}, execution
    active = Counter(execution.job_instance_id for execution in reading.recent(limit=1000, active=True))
    assert all(count == 1 for count in active.values())
