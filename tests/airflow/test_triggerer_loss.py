"""What only one test at a time may do to the shared Airflow; and what must hold after all stories."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter

import pytest

from airflow_dbpartition.demo.processes import SessionProcess, family, send_signal
from tests.airflow import steps_of_stories
from tests.airflow.deployment import Deployment, gated, wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_killed_triggerer_stops_nothing_and_its_successor_ends_the_wait(deployment: Deployment) -> None:
    run = deployment.run("deferring_operator", "triggerer_killed", gated(2))
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


def test_a_terminated_triggerer_stops_nothing_either(deployment: Deployment) -> None:
    run = deployment.run("deferring_operator", "triggerer_drained", gated(2))
    run.wait_for_claims(2)
    run.wait_for_trigger("work")

    deployment.airflow.restart("triggerer")
    assert run.execution().status.value == "STARTED"
    run.open()

    assert run.ends() == "success"
    assert run.begun() == {"p0": 1, "p1": 1}


def test_a_stalled_triggerer_that_comes_back_after_a_take_over_stops_nothing(deployment: Deployment) -> None:
    """Airflow 3.3 then calls `on_kill` on a healthy task; a later Airflow may not."""
    run = deployment.run("deferring_operator", "triggerer_stalled", gated(2))
    run.wait_for_claims(2)
    run.wait_for_trigger("work")
    stalled = family(deployment.airflow.pid("triggerer"))
    starts = f"trigger deferring_operator/{run.run_id}/work"

    for pid in stalled:
        send_signal(pid, signal.SIGSTOP)
    second = SessionProcess(
        [sys.executable, "-m", "airflow", "triggerer", "--skip-serve-logs"],
        log_path=deployment.airflow.log_path("second-triggerer"),
        environment=deployment.airflow.environment(),
        cwd=deployment.airflow.home,
    )
    try:
        wait_until(lambda: run.log("work").count(starts) > 1, "the second triggerer has taken over", every_s=0.7)
        for pid in stalled:
            send_signal(pid, signal.SIGCONT)
        with contextlib.suppress(AssertionError):  # where Airflow does not call it, there is nothing to see
            wait_until(lambda: "the task is still deferred" in run.log("work"), "on_kill", timeout_s=20, every_s=0.7)
        assert run.execution().status.value == "STARTED"
        run.open()

        assert run.ends() == "success"
        assert run.execution().status.value == "COMPLETED"
        assert run.begun() == {"p0": 1, "p1": 1}
    finally:
        for pid in stalled:
            send_signal(pid, signal.SIGCONT)
        second.kill()


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
