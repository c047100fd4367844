"""However a task ends, it leaves no connection to the database open: counted on the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import psycopg2
import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    TaskDeferred,
)
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TriggerEvent
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from airflow_dbpartition import listener
from airflow_dbpartition.hooks import JobRepositoryHook
from airflow_dbpartition.operators import PurgeJobRepositoryOperator, StopJobExecutionOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.sensors import LiveNodesSensor, PartitionCompletionSensor
from airflow_dbpartition.triggers import JobLaunchTrigger, LiveNodesTrigger, PartitionCompletionTrigger
from tests.airflow.test_listener import instance, settled
from tests.airflow.test_tries import execute, operator, sensor, waiting
from tests.airflow.worlds import Try, connection_to, define
from tests.databases import Database, run_sql, with_user
from tests.scenarios import add_node, fail_all, finish_all

PATIENCE_S = 5.0  # the server hears of a closed connection a moment later


@dataclass
class World:
    """A job repository, and Airflow's connection `repo` to it by a user that nobody else is.

    Args:
        repository: the test's own.
        opened: how often a connection was made, by whomever.
        count: the user's sessions on the server.
    """

    repository: JobRepository
    opened: Callable[[], int]
    count: Callable[[], int]

    def planned(self) -> int:
        add_node(self.repository)
        planned: int = execute(operator(), Try())
        return planned

    def completed(self) -> int:
        planned = self.planned()
        finish_all(self.repository, planned)
        return planned

    def failed(self) -> int:
        planned = self.planned()
        fail_all(self.repository, planned)
        return planned

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """What happens meanwhile connects, and none of its connections is there afterwards."""
        assert self.left() == 0
        before = self.opened()
        yield
        assert self.left() == 0
        assert self.opened() > before

    def left(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while (left := self.count()) and time.monotonic() < end:
            time.sleep(0.02)
        return left


@pytest.fixture
def world(postgres: Database, postgres_repository: JobRepository, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    user = f"manager_{secrets.token_hex(4)}"
    run_sql(postgres, f"CREATE ROLE {user} LOGIN SUPERUSER")
    define(monkeypatch, "repo", connection_to(with_user(postgres, user)))
    opened: list[object] = []
    connect = psycopg2.connect

    def counting(*arguments: Any, **options: Any) -> Any:
        opened.append(None)
        return connect(*arguments, **options)

    monkeypatch.setattr(psycopg2, "connect", counting)
    administrator = create_engine(postgres.url, poolclass=NullPool)

    def count() -> int:
        with administrator.connect() as connection:
            query = text("SELECT count(*) FROM pg_stat_activity WHERE usename = :user")
            return int(connection.execute(query, {"user": user}).scalar_one())

    gc.disable()  # it would close what nobody has closed, sooner or later
    try:
        yield World(postgres_repository, lambda: len(opened), count)
    finally:
        gc.enable()
        gc.collect()
        run_sql(postgres, f"DROP ROLE {user}")


def test_a_connection_that_is_left_open_is_seen(world: World) -> None:
    repository = JobRepository.connect(JobRepositoryHook("repo").address().config(pool_size=1))
    repository.nodes.all()
    assert world.count() == 1
    repository.close()
    assert world.left() == 0


# --- operator ------------------------------------------------------------------------------------------------------


def test_after_a_plan(world: World) -> None:
    seen: list[int] = []

    def partitions(grid_size: int) -> Any:
        seen.append(world.count())
        return {"a": {}}

    with world.counted():
        execute(operator(partitioner=partitions), Try())
    assert seen[0] <= 1, "and it holds one at most"


def test_after_a_plan_that_fails(world: World) -> None:
    def partitions(grid_size: int) -> Any:
        raise LookupError("no such table")

    with world.counted(), pytest.raises(AirflowException, match="no such table"):
        execute(operator(partitioner=partitions), Try())


def test_after_a_partitioner_that_asks_a_database_by_a_connection_of_its_own(world: World) -> None:
    world.planned()
    partitioner = ColumnRangePartitioner(
        conn_id="repo", schema=world.repository.schema, table="batch_partitions", column="step_execution_id"
    )
    with world.counted():
        execute(operator(partitioner=partitioner), Try(run_id="second"))
    missing = ColumnRangePartitioner(conn_id="repo", table="nowhere", column="id")
    with world.counted(), pytest.raises(AirflowException):
        execute(operator(partitioner=missing), Try(run_id="third"))


def test_after_a_wait(world: World) -> None:
    world.completed()
    with world.counted():
        execute(waiting(), Try().retried())


def test_after_a_wait_that_fails(world: World) -> None:
    planned = world.failed()
    with world.counted(), pytest.raises(AirflowException, match="2 of 2 partitions failed"):
        execute(sensor(planned), Try(task_id="wait"))


def test_after_a_wait_that_times_out(world: World) -> None:
    with world.counted(), pytest.raises(AirflowException, match="deadline"):
        execute(waiting(timeout=0.1), Try())


def test_after_a_deferral_and_after_the_resumption(world: World) -> None:
    add_node(world.repository)
    this, made = Try(), waiting(deferrable=True)
    with world.counted(), pytest.raises(TaskDeferred):
        execute(made, this)
    planned = world.repository.reading.recent(limit=1)[0].job_execution_id
    finish_all(world.repository, planned)
    with world.counted():
        made.execute_complete(this.context(), {"message": "", "job_execution_id": planned})


# --- sensors -------------------------------------------------------------------------------------------------------


def test_after_a_look(world: World) -> None:
    planned = world.planned()
    with world.counted():
        assert not sensor(planned).poke(Try(task_id="wait").context()).is_done
    with world.counted(), pytest.raises(AirflowRescheduleException):
        execute(sensor(planned, mode="reschedule"), Try(task_id="wait"))
    with world.counted(), pytest.raises(AirflowSensorTimeout):
        execute(sensor(planned, timeout=0.1), Try(task_id="wait"))


def test_after_a_deferred_look(world: World) -> None:
    planned = world.planned()
    with world.counted(), pytest.raises(TaskDeferred):
        execute(sensor(planned, deferrable=True), Try(task_id="wait"))
    never = PartitionCompletionSensor(task_id="wait", job_name="never", repository_conn_id="repo", deferrable=True)
    with world.counted(), pytest.raises(TaskDeferred):
        execute(never, Try(task_id="wait"))


def test_after_a_look_for_nodes(world: World) -> None:
    with world.counted(), pytest.raises(AirflowSensorTimeout):
        execute(LiveNodesSensor(task_id="live", repository_conn_id="repo", poke_interval=0.1, timeout=0.1), Try())
    with world.counted(), pytest.raises(TaskDeferred):
        execute(LiveNodesSensor(task_id="live", repository_conn_id="repo", deferrable=True), Try())


# --- the other tasks, and the hook ---------------------------------------------------------------------------------


def test_after_a_purge_and_a_stop(world: World) -> None:
    planned = world.planned()
    with world.counted():
        execute(StopJobExecutionOperator(task_id="s", job_execution_id=planned, repository_conn_id="repo"), Try())
    with world.counted():
        purge = PurgeJobRepositoryOperator(task_id="p", older_than=timedelta(days=1), repository_conn_id="repo")
        execute(purge, Try())


def test_after_each_use_of_the_hook(world: World) -> None:
    planned, hook = world.completed(), JobRepositoryHook("repo")
    with world.counted():
        hook.summary(planned)
    with world.counted():
        assert len(list(hook.iter_results(planned))) == 2
    with world.counted():
        assert len(list(islice(hook.iter_results(planned), 1))) == 1
    with world.counted():
        assert hook.test_connection()[0]


def test_after_an_aggregator_that_stops_half_way_or_fails_there(world: World) -> None:
    world.completed()

    def fails(results: Iterator[Any]) -> None:
        next(results)
        raise LookupError("one is enough")

    with world.counted():
        assert execute(waiting(aggregator=lambda results: next(results)[0]), Try().retried())
    with world.counted(), pytest.raises(LookupError) as kept:  # as Airflow keeps it for callbacks and listeners
        execute(waiting(aggregator=fails), Try().retried())
    assert kept.tb is not None


# --- the triggerer and the API server ------------------------------------------------------------------------------


def test_when_the_last_wait_of_a_triggerer_is_over(world: World) -> None:
    planned = world.completed()

    async def main() -> int:
        waits: list[BaseTrigger] = [PartitionCompletionTrigger(planned, "repo", poll_interval_s=0.1) for _ in range(3)]
        waits.append(LiveNodesTrigger(1, "default", "repo", poll_interval_s=0.1))
        waits.append(JobLaunchTrigger("dag.task", _key_of(world, planned), "repo", poll_interval_s=0.1))
        await asyncio.gather(*(_fired(wait) for wait in waits))
        return await asyncio.to_thread(world.left)  # while its loop goes on

    with world.counted():
        assert asyncio.run(main()) == 0


def test_after_a_kill_of_a_deferred_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, this = world.planned(), Try()
    states = {"run": {"task": "failed"}}
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: states))
    killed = PartitionCompletionTrigger(planned, "repo", owner_token="somebody")
    killed.task_instance = this  # type: ignore[assignment]
    with world.counted():
        asyncio.run(killed.on_kill())


def test_after_a_click_in_the_api_server(world: World) -> None:
    add_node(world.repository)
    this = Try()
    execute(operator(), this)
    with world.counted():
        listener.on_task_instance_failed(None, instance(this, operator()), "marked")
        settled()


async def _fired(trigger: BaseTrigger) -> list[TriggerEvent]:
    return [event async for event in trigger.run()]


def _key_of(world: World, job_execution_id: int) -> str:
    return world.repository.reading.execution(job_execution_id).job_key
