"""The trigger: what it stores, when it fires, and whom it stops when it is killed."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.triggers import PartitionCompletionTrigger
from tests.airflow.worlds import Try
from tests.scenarios import add_node, fail_all, finish_all, submit

PATIENCE_S = 30.0


def trigger(job_execution_id: int, **options: Any) -> PartitionCompletionTrigger:
    return PartitionCompletionTrigger(job_execution_id, "repo", **{"poll_interval_s": 0.2, **options})


def rebuilt(old: PartitionCompletionTrigger) -> PartitionCompletionTrigger:
    """What another triggerer makes of what was stored."""
    path, arguments = old.serialize()
    module, _, name = path.rpartition(".")
    made: PartitionCompletionTrigger = getattr(importlib.import_module(module), name)(
        **json.loads(json.dumps(arguments))
    )
    return made


def events(watching: PartitionCompletionTrigger) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in watching.run()]

    return asyncio.run(asyncio.wait_for(collect(), PATIENCE_S))


def airflow_says(monkeypatch: pytest.MonkeyPatch, state: str | None, ask: Callable[[], None] = lambda: None) -> None:
    """Let the task be in this state, as Airflow's API would answer."""

    def states(**asked: Any) -> dict[str, dict[str, str]]:
        ask()
        (task_id,) = asked["task_ids"]
        return {} if state is None else {"run": {task_id: state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))


def killed(watching: PartitionCompletionTrigger) -> None:
    watching.task_instance = Try()  # type: ignore[assignment]
    asyncio.run(asyncio.wait_for(watching.on_kill(), PATIENCE_S))


def test_what_is_stored_is_small_json_without_secrets(connected: JobRepository) -> None:
    path, arguments = trigger(7, owner_token="token", no_nodes_timeout_s=60.0).serialize()
    assert path == "airflow_dbpartition.triggers.PartitionCompletionTrigger"
    assert arguments == {
        "job_execution_id": 7,
        "repository_conn_id": "repo",
        "owner_token": "token",
        "poll_interval_s": 0.2,
        "no_nodes_timeout_s": 60.0,
    }
    assert rebuilt(trigger(7, owner_token="token")).serialize() == trigger(7, owner_token="token").serialize()


def test_it_fires_once_when_the_execution_has_ended(connected: JobRepository) -> None:
    add_node(connected)
    good = submit(connected, 1, job="good").job_execution_id
    finish_all(connected, good)
    bad = submit(connected, 1, job="bad").job_execution_id
    fail_all(connected, bad)

    (event,) = events(rebuilt(trigger(good)))
    assert (event["status"], event["job_execution_id"]) == ("completed", good)
    (event,) = events(trigger(bad))
    assert event["status"] == "failed"


def test_it_never_fires_before_its_first_interval_is_over(connected: JobRepository) -> None:
    """Airflow fails a deferred task that comes back before its scheduler has heard of its going."""
    job = submit(connected, 0).job_execution_id
    began = time.monotonic()
    assert events(trigger(job, poll_interval_s=1.0))
    assert time.monotonic() - began >= 1.0


def test_running_it_a_second_time_does_no_harm(connected: JobRepository) -> None:
    add_node(connected)
    job = submit(connected, 1).job_execution_id
    finish_all(connected, job)
    watching = trigger(job)
    assert events(watching) == events(watching)


@pytest.mark.parametrize("state", ["failed", "success", "skipped", None])
def test_a_kill_stops_what_this_try_owns(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    job = submit(connected, 2, owner_token="mine").job_execution_id
    airflow_says(monkeypatch, state)
    killed(trigger(job, owner_token="mine"))

    execution = connected.reading.execution(job)
    assert execution.status.value == "STOPPED"
    assert f"killed in Airflow while deferred (its state: {state or 'cleared'})" in str(execution.exit_message)


def test_a_kill_of_a_healthy_task_stops_nothing(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a take-over by another triggerer."""
    job = submit(connected, 2, owner_token="mine").job_execution_id
    airflow_says(monkeypatch, "deferred")
    killed(trigger(job, owner_token="mine"))
    assert connected.reading.execution(job).status.value == "STARTING"


def test_a_kill_by_an_older_try_stops_nothing(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(connected, 2, owner_token="old").job_execution_id
    connected.executions.attach(job, owner_token="new")
    airflow_says(monkeypatch, "running")  # the new try, before it defers
    killed(trigger(job, owner_token="old"))
    assert connected.reading.execution(job).status.value == "STARTING"


def test_a_wait_that_only_watches_stops_nothing(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(connected, 2, owner_token="somebody").job_execution_id
    airflow_says(monkeypatch, "failed")
    killed(trigger(job, owner_token=None))
    assert connected.reading.execution(job).status.value == "STARTING"


def test_a_kill_that_airflow_cancels_half_way_is_carried_out(
    connected: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(connected, 2, owner_token="mine").job_execution_id
    asked, answer = threading.Event(), threading.Event()

    def slowly() -> None:
        asked.set()
        answer.wait(PATIENCE_S)

    airflow_says(monkeypatch, "failed", slowly)
    watching = trigger(job, owner_token="mine")
    watching.task_instance = Try()  # type: ignore[assignment]

    async def main() -> None:
        kill = asyncio.ensure_future(watching.on_kill())
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        kill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await kill
        answer.set()
        while (await asyncio.to_thread(connected.reading.execution, job)).status.value != "STOPPED":
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_kill_stops_the_restart_that_is_waited_for(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(connected)
    first = submit(connected, 1).job_execution_id
    fail_all(connected, first)
    second = connected.executions.restart(
        first, place=lambda work: {one.key: None for one in work}, owner_token="mine"
    ).job_execution_id
    airflow_says(monkeypatch, "failed")
    killed(trigger(first, owner_token="mine"))
    assert connected.reading.execution(second).status.value == "STOPPED"
