"""Which job a task stands for when others have done it already, and what a task makes of its job's results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from airflow.sdk.observability import stats

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.repository import JobRepository
from tests.airflow.test_tries import all_executions, execute, latest, operator, sensor, waiting
from tests.airflow.worlds import Try
from tests.scenarios import add_node, claim, complete, fail_all, finish_all, statuses

DAILY = {"job_name": "daily", "job_parameters": {"business_date": "2026-11-30"}}


# --- a second run for the same parameters --------------------------------------------------------------------------


@pytest.fixture
def done(connected: JobRepository) -> int:
    """The daily job, completed by another run."""
    add_node(connected)
    job_execution_id: int = execute(operator(**DAILY), Try(run_id="earlier"))
    finish_all(connected, job_execution_id)
    return job_execution_id


def test_a_job_that_another_run_has_completed_is_returned(connected: JobRepository, done: int) -> None:
    assert execute(operator(**DAILY), Try()) == done
    summary = execute(waiting(**DAILY, if_complete="return"), Try())
    assert (summary["job_execution_id"], summary["partitions"]["completed"]) == (done, 2)


def test_or_it_is_refused_by_naming_the_run_that_did_it(connected: JobRepository, done: int) -> None:
    with pytest.raises(AirflowFailException, match=rf"job execution {done} has completed job 'daily'.*'earlier'"):
        execute(operator(**DAILY, if_complete="fail"), Try(max_tries=3))
    assert len(all_executions(connected)) == 1


def test_or_it_is_done_again_once_for_each_run(connected: JobRepository, done: int) -> None:
    first = Try(max_tries=1)
    again = execute(operator(**DAILY, if_complete="rerun"), first)
    assert (again != done, latest(connected).generation) == (True, 2)
    finish_all(connected, again)
    assert execute(operator(**DAILY, if_complete="rerun"), first.retried()) == again, "a retry is the same run"
    assert execute(operator(**DAILY, if_complete="fail"), first.retried()) == again, "and has done nothing twice"


@pytest.mark.parametrize("if_complete", ["return", "fail", "rerun"])
def test_one_that_still_runs_is_attached_to_and_one_that_failed_is_restarted(
    connected: JobRepository, if_complete: str
) -> None:
    add_node(connected)
    running = execute(operator(**DAILY), Try(run_id="earlier"))
    assert execute(operator(**DAILY, if_complete=if_complete), Try()) == running
    fail_all(connected, running)
    restarted = execute(operator(**DAILY, if_complete=if_complete), Try(run_id="third"))
    assert [execution.generation for execution in all_executions(connected)] == [1, 1]
    assert latest(connected).job_execution_id == restarted


# --- a mapped task whose input changes -----------------------------------------------------------------------------


def mapped(contexts: Any, **options: Any) -> PartitionedStepOperator:
    return operator(partitioner=contexts, **options)


def test_a_map_index_with_the_same_input_restarts_its_job(connected: JobRepository) -> None:
    add_node(connected)
    this = Try(map_index=0, max_tries=1)
    first = execute(mapped({"a": {"file": "x"}}), this)
    fail_all(connected, first)
    execute(mapped({"a": {"file": "x"}}), this.retried())
    assert [execution.generation for execution in all_executions(connected)] == [1, 1]


@pytest.mark.parametrize("first_ends", ["completed", "failed", "still waiting"])
def test_a_map_index_with_another_input_is_another_job(connected: JobRepository, first_ends: str) -> None:
    add_node(connected)
    this = Try(map_index=0, max_tries=1)
    first = execute(mapped({"a": {"file": "x"}}), this)
    if first_ends == "completed":
        finish_all(connected, first)
    elif first_ends == "failed":
        fail_all(connected, first)
    second = execute(mapped({"b": {"file": "y"}}), this.retried())
    before, after = all_executions(connected)
    assert (before.generation, after.generation) == (1, 2)
    assert not before.status.is_active
    assert statuses(connected, second) == {"PENDING": 1}
    assert [row.context["file"] for row in connected.reading.partitions(second)] == ["y"]


def test_a_task_that_is_not_mapped_keeps_its_job_when_its_code_changes(connected: JobRepository) -> None:
    add_node(connected)
    this = Try(max_tries=1)
    fail_all(connected, execute(operator(partitioner={"a": {}}), this))
    execute(operator(partitioner={"other": {}}), this.retried())
    assert [execution.generation for execution in all_executions(connected)] == [1, 1]
    assert [row.partition_key for row in connected.reading.partitions(latest(connected).job_execution_id)] == ["a"]


# --- results -------------------------------------------------------------------------------------------------------


def total(results: Iterator[tuple[str, Any]]) -> int:
    return sum(result["rows"] for _key, result in results)


def broken(results: Iterator[tuple[str, Any]]) -> None:
    raise LookupError(f"{len(list(results))} results, and none is right")


def complete_with_rows(repository: JobRepository, job_execution_id: int) -> None:
    for number, taken in enumerate(claim(repository, limit=10)):
        assert taken.job_execution_id == job_execution_id
        complete(repository, taken, result={"rows": 10 + number})


@pytest.mark.parametrize("aggregator", [total, f"{__name__}:total"])
def test_what_the_aggregator_returns_is_the_tasks_value_of_operator_and_sensor(
    connected: JobRepository, aggregator: Any
) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    complete_with_rows(connected, planned)
    assert execute(waiting(aggregator=aggregator), this.retried()) == 21
    assert execute(sensor(planned, aggregator=aggregator), Try(task_id="wait")) == 21


def test_an_aggregator_that_fails_fails_the_task_with_its_own_error_and_a_retry_runs_only_it(
    connected: JobRepository,
) -> None:
    add_node(connected)
    this = Try(max_tries=1)
    complete_with_rows(connected, execute(operator(), this))
    with pytest.raises(LookupError, match="2 results, and none is right"):
        execute(waiting(aggregator=broken), this.retried())
    assert execute(waiting(aggregator=total), this.retried().retried()) == 21
    assert len(all_executions(connected)) == 1


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        ("total", "expected aggregator to be a function of the results, or \"package.module:function\", got 'total'"),
        ("some module:total", "got 'some module:total'"),
        (3, "got 3"),
    ],
)
def test_what_can_be_no_aggregator_is_refused_when_the_dag_is_read(aggregator: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        waiting(aggregator=aggregator)
    assert words in str(refused.value)
    assert str(refused.value).startswith("task 'task': ")


def test_an_aggregator_that_nobody_would_call_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="would never be called: set wait_for_completion=True"):
        operator(aggregator=total)


@pytest.mark.parametrize("path", ["no.such_module:total", f"{__name__}:nothing"])
def test_an_aggregator_that_cannot_be_imported_is_named(connected: JobRepository, path: str) -> None:
    add_node(connected)
    this = Try()
    finish_all(connected, execute(operator(), this))
    with pytest.raises(AirflowException, match=f"aggregator '{path}' cannot be imported"):
        execute(waiting(aggregator=path), this.retried())


# --- what Airflow is told ------------------------------------------------------------------------------------------


class Recorder:
    """What a task tells Airflow beside its return value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted: dict[str, int] = {}
        self.stored: dict[str, Any] = {}
        self.pushed: dict[str, Any] = {}
        self.event = SimpleNamespace(extra={})
        monkeypatch.setattr(stats, "incr", self._incr)

    def _incr(self, name: str, count: int = 1, *, tags: dict[str, str]) -> None:
        assert (name, tags["dag_id"], tags["task_id"]) == ("dbpartition.partitions", "dag", "task")
        self.counted[tags["outcome"]] = self.counted.get(tags["outcome"], 0) + count

    def set(self, key: str, value: Any) -> None:
        json.dumps(value)
        self.stored[key] = value

    def context(self, this: Try, asset: object) -> Any:
        this.xcom_push = lambda *, key, value: self.pushed.update({key: value})  # type: ignore[attr-defined]
        return {**this.context(), "task_state_store": self, "outlet_events": {asset: self.event}}


def test_a_job_that_ends_well_is_counted_stored_and_told_to_the_assets(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(connected)
    this, asset, told = Try(), "an asset", Recorder(monkeypatch)
    planned = operator().execute(told.context(this, asset))
    assert told.stored == {"dbpartition": {"job_execution_id": planned, "job_name": "dag.task"}}
    assert told.pushed == {"_link_PartitionsLink": f"/dbpartition/repo/executions/{planned}"}
    assert (told.counted, told.event.extra) == ({}, {})

    finish_all(connected, planned)
    made = waiting()
    made.outlets = [asset]
    summary = made.execute(told.context(this.retried(), asset))
    assert told.counted == {"completed": 2}
    assert told.stored["dbpartition"] == told.event.extra["dbpartition"] == summary


def test_a_job_that_fails_is_counted_too_and_makes_no_asset_event(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(connected)
    this, asset, told = Try(), "an asset", Recorder(monkeypatch)
    planned = operator().execute(told.context(this, asset))
    (first,) = claim(connected)
    complete(connected, first)
    fail_all(connected, planned)
    made = sensor(planned)
    made.task_id = "task"
    made.outlets = [asset]
    with pytest.raises(AirflowException):
        made.execute(told.context(Try(), asset))
    assert told.counted == {"completed": 1, "failed": 1}
    assert told.event.extra == {}


def test_a_store_that_refuses_does_not_fail_the_task(connected: JobRepository) -> None:
    class Refusing:
        def set(self, key: str, value: Any) -> None:
            raise RuntimeError("no room")

    add_node(connected)
    context: Any = {**Try().context(), "task_state_store": Refusing()}
    assert operator().execute(context)
