"""A sensor that waits for a job by its name: launched by anybody, now or later."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferralTimeout,
    TaskDeferred,
)

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.sensors import PartitionCompletionSensor
from airflow_dbpartition.triggers import JobLaunchTrigger, PartitionCompletionTrigger
from tests.airflow.test_tries import execute, meanwhile, operator, when
from tests.airflow.worlds import Try
from tests.scenarios import add_node, fail_all, finish_all

DAILY = {"job_name": "daily", "job_parameters": {"business_date": "2026-11-30"}}


def by_name(**options: Any) -> PartitionCompletionSensor:
    return PartitionCompletionSensor(
        **{
            "task_id": "wait",
            "repository_conn_id": "repo",
            "poke_interval": 0.2,
            "deferrable": False,
            **DAILY,
            **options,
        }
    )


def launch(repository: JobRepository) -> int:
    """By the run of another DAG."""
    add_node(repository)
    launched: int = execute(operator(**DAILY), Try(dag_id="nightly", run_id="its own"))
    return launched


def test_it_finds_a_job_that_has_ended(connected: JobRepository) -> None:
    finish_all(connected, launch(connected))
    assert execute(by_name(), Try(task_id="wait"))["job_name"] == "daily"


def test_it_waits_for_a_job_that_is_launched_later(connected: JobRepository) -> None:
    began = time.monotonic()

    def launch_and_finish() -> None:
        finish_all(connected, launch(connected))

    with meanwhile(when(lambda: time.monotonic() - began > 0.5, launch_and_finish)):
        assert execute(by_name(timeout=30), Try(task_id="wait"))["partitions"]["completed"] == 2


def test_another_date_is_another_job(connected: JobRepository) -> None:
    finish_all(connected, launch(connected))
    with pytest.raises(AirflowSensorTimeout, match=r"timed out after 0.3 s: job 'daily' with .*2026-12-01.* was never"):
        execute(by_name(job_parameters={"business_date": "2026-12-01"}, timeout=0.3), Try(task_id="wait"))


def test_soft_fail_skips_what_was_never_launched_but_not_what_failed(connected: JobRepository) -> None:
    this = Try(task_id="wait")
    with pytest.raises(AirflowSkipException, match="was never launched"):
        execute(by_name(timeout=0.3, soft_fail=True), this)
    deferred = by_name(soft_fail=True, deferrable=True)
    with pytest.raises(AirflowSkipException, match="was never launched"):
        deferred.resume_execution("execute_launched", {"__fail__": "timed out"}, this.context())
    fail_all(connected, launch(connected))
    with pytest.raises(AirflowException, match="2 of 2 partitions failed"):
        execute(by_name(soft_fail=True), this)


@pytest.fixture(autouse=True)
def deferrals_time_out_as_airflow_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk import BaseOperator

    real = BaseOperator.resume_execution

    def resume(self: Any, next_method: str, next_kwargs: Any, context: Any) -> Any:
        if (next_kwargs or {}).get("__fail__"):
            raise TaskDeferralTimeout("timed out")
        return real(self, next_method, next_kwargs, context)

    monkeypatch.setattr(BaseOperator, "resume_execution", resume)


def test_a_rescheduled_one_looks_and_goes(connected: JobRepository) -> None:
    with pytest.raises(AirflowRescheduleException):
        execute(by_name(mode="reschedule"), Try(task_id="wait"))
    finish_all(connected, launch(connected))
    assert execute(by_name(mode="reschedule"), Try(task_id="wait"))["partitions"]["completed"] == 2


def test_a_rescheduled_one_times_out_over_all_its_looks(connected: JobRepository) -> None:
    long_ago = datetime.now(timezone.utc) - timedelta(seconds=100)
    with pytest.raises(AirflowSensorTimeout, match="was never launched"):
        execute(by_name(mode="reschedule", timeout=60), Try(task_id="wait", first_reschedule=long_ago))


def test_a_deferred_one_waits_for_the_launch_and_then_for_the_end(connected: JobRepository) -> None:
    this = Try(task_id="wait")
    with pytest.raises(TaskDeferred) as deferred:
        execute(by_name(deferrable=True, timeout=60), this)
    first: Any = deferred.value.trigger
    assert isinstance(first, JobLaunchTrigger)
    assert timedelta(seconds=55) < deferred.value.timeout <= timedelta(seconds=60)

    launched = launch(connected)

    async def fired() -> Any:
        return [event.payload async for event in JobLaunchTrigger(**first.serialize()[1]).run()]

    (event,) = asyncio.run(asyncio.wait_for(fired(), 30))
    assert event["job_execution_id"] == launched
    with pytest.raises(TaskDeferred) as again:
        by_name(deferrable=True, timeout=60).execute_launched(this.context(), event, **(deferred.value.kwargs or {}))
    second = again.value.trigger
    assert isinstance(second, PartitionCompletionTrigger)
    assert (second.job_execution_id, second.owner_token) == (launched, None), "another run's: it only watches"
    assert again.value.timeout <= timedelta(seconds=60), "no fresh window"

    finish_all(connected, launched)
    summary = by_name(deferrable=True).execute_complete(this.context(), None, job_execution_id=launched)
    assert summary["partitions"]["completed"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {"job_name": None, "job_parameters": None},
        {"job_execution_id": 3},
    ],
)
def test_it_wants_an_id_or_a_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="task 'wait': expected job_execution_id, or job_name"):
        by_name(**options)


def test_an_id_that_came_out_of_its_template_as_none_is_named(connected: JobRepository) -> None:
    made = by_name(job_name=None, job_parameters=None, job_execution_id="{{ params.id }}")
    made.job_execution_id = None
    with pytest.raises(
        AirflowException, match=r"expected job_execution_id, or job_name .* got job_execution_id=None, job_name=None"
    ):
        execute(made, Try(task_id="wait"))
