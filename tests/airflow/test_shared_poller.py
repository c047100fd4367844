"""All waits of an event loop on one job repository: one thread, one connection, one query a tick."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from sqlalchemy import event, text

from airflow_dbpartition import polling
from airflow_dbpartition.config import Timings
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.polling import SharedPoller, Update, shared_poller
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.waiting import Outcome
from tests.databases import Database, run_sql, with_user
from tests.scenarios import add_node, claim_one, complete, fail_all, finish_all, submit, to_nobody

PATIENCE_S = 30.0

T = TypeVar("T")


@dataclass
class Watched:
    """Opens the repository for a poller, and counts what it does there."""

    database: Database
    timings: Timings = field(default_factory=Timings)
    connects: int = 0
    queries: list[str] = field(default_factory=list)
    opened: int = 0
    refuse: str | None = None

    async def __call__(self) -> tuple[Callable[[], JobRepository], Timings]:
        if self.refuse:
            raise ConfigurationError(self.refuse)
        return self._open, self.timings

    def _open(self) -> JobRepository:
        self.opened += 1
        repository = JobRepository.connect(self.database.config(pool_size=1))

        @event.listens_for(repository.engine, "connect")
        def connect(*_: object) -> None:
            self.connects += 1

        @event.listens_for(repository.engine, "before_cursor_execute")
        def execute(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.lstrip().upper().startswith("SELECT"):
                self.queries.append(statement)

        return repository


def run(main: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(main, PATIENCE_S)

    return asyncio.run(bounded())


async def last(news: AsyncIterator[Update]) -> Update:
    """The update that ends the wait."""
    found: Update | None = None
    async for update in news:
        found = update
    assert found is not None
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Wait, without holding up the loop, until the condition holds."""
    while not condition():
        await asyncio.sleep(0.02)


def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> Awaitable[T]:
    """What the test itself does to the database must not block the loop either."""
    return asyncio.to_thread(function, *args, **kwargs)


def test_a_hundred_waits_share_one_connection_and_one_query_a_tick(
    database: Database, repository: JobRepository
) -> None:
    add_node(repository)
    jobs = [submit(repository, 1, job=f"job {number}").job_execution_id for number in range(100)]
    watched = Watched(database)
    poller = SharedPoller(watched)

    async def main() -> list[Update]:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=0.2))) for job in jobs]
        await until(lambda: poller.ticks >= 3)
        begun, queries = poller.ticks, len(watched.queries)
        await until(lambda: poller.ticks >= begun + 5)
        assert len(watched.queries) - queries <= (poller.ticks - begun) + 1
        for job in jobs:
            await in_thread(finish_all, repository, job)
        return await asyncio.gather(*waits)

    ended = run(main())
    assert [update.job_execution_id for update in ended] == jobs
    assert {update.outcome for update in ended} == {Outcome.COMPLETED}
    assert (watched.opened, watched.connects) == (1, 1)


def test_waits_that_come_together_share_a_tick(database: Database, repository: JobRepository) -> None:
    jobs = [submit(repository, 1, job=f"job {number}").job_execution_id for number in range(30)]
    poller = SharedPoller(Watched(database))

    async def main() -> None:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=60))) for job in jobs]
        await until(lambda: poller.ticks >= 1)
        await asyncio.sleep(1.0)  # nothing else is to happen now: the next tick is a minute away
        assert poller.ticks <= 3
        for wait in waits:
            wait.cancel()

    run(main())


def test_each_wait_hears_of_progress_and_of_its_own_end_only(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    one, other = (submit(repository, 2, job=name).job_execution_id for name in ("one", "other"))
    poller = SharedPoller(Watched(database))

    async def main() -> tuple[list[Update], Update]:
        heard: list[Update] = []

        async def listen() -> None:
            async for update in poller.watch(one, poll_interval_s=0.2):
                heard.append(update)

        first = asyncio.ensure_future(listen())
        second = asyncio.ensure_future(last(poller.watch(other, poll_interval_s=0.2)))
        await until(lambda: heard)
        taken = await in_thread(claim_one, repository)
        assert taken.job_execution_id == one
        await in_thread(complete, repository, taken)
        await in_thread(finish_all, repository, one)
        await first
        assert not second.done()
        await in_thread(finish_all, repository, other)
        return heard, await second

    heard, second = run(main())
    assert heard[0].message == f"job execution {one}: 0/2 partitions done, 2 waiting"
    assert [update.outcome for update in heard[:-1]] == [None] * (len(heard) - 1)
    assert (heard[-1].job_execution_id, heard[-1].outcome) == (one, Outcome.COMPLETED)
    assert second.job_execution_id == other


def test_a_restart_is_followed(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 1)
    fail_all(repository, first.job_execution_id)
    second = repository.executions.restart(first.job_execution_id, place=to_nobody)
    poller = SharedPoller(Watched(database))

    async def main() -> list[Update]:
        heard: list[Update] = []

        async def listen() -> None:
            async for update in poller.watch(first.job_execution_id, poll_interval_s=0.2):
                heard.append(update)

        listening = asyncio.ensure_future(listen())
        await until(lambda: heard)
        await in_thread(finish_all, repository, second.job_execution_id)
        await listening
        return heard

    heard = run(main())
    restarted = f"job execution {first.job_execution_id} was restarted as {second.job_execution_id}"
    assert heard[0] == Update(second.job_execution_id, restarted)
    assert (heard[-1].job_execution_id, heard[-1].outcome) == (second.job_execution_id, Outcome.COMPLETED)


def test_a_failure_a_stop_a_missed_deadline_and_a_missing_execution_end_the_wait(
    database: Database, repository: JobRepository
) -> None:
    add_node(repository)
    failed = submit(repository, 1, job="failed").job_execution_id
    fail_all(repository, failed)
    stopped = submit(repository, 1, job="stopped").job_execution_id
    repository.executions.stop(stopped, reason="no longer wanted")
    late = submit(repository, 1, job="late", timeout_s=-1.0).job_execution_id
    poller = SharedPoller(Watched(database))

    async def main() -> list[Update]:
        jobs = (failed, stopped, late, 4711)
        return list(await asyncio.gather(*(last(poller.watch(job, poll_interval_s=0.2)) for job in jobs)))

    ended = run(main())
    expected = [Outcome.FAILED, Outcome.STOPPED, Outcome.LATE, Outcome.FAILED]
    assert [update.outcome for update in ended] == expected
    assert ended[-1].message == "there is no job execution 4711"


def test_the_poller_ends_what_no_worker_is_there_to_end(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "SWEEP_EVERY_S", 0.3)
    add_node(repository)
    job = submit(repository, 1).job_execution_id
    complete(repository, claim_one(repository))  # and its worker dies before it ends the execution

    assert run(last(SharedPoller(Watched(database)).watch(job, poll_interval_s=0.2))).outcome is Outcome.COMPLETED


def test_a_wait_hears_when_nobody_has_been_there_to_work(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NODES_EVERY_S", 0.3)
    add_node(repository, "elsewhere", node_group="other")
    deserted = submit(repository, 1, job="deserted").job_execution_id
    attended = submit(repository, 1, job="attended", node_group="other").job_execution_id
    watched = Watched(database, timings=Timings(heartbeat_s=0.1, unreachable_after_s=0.4, remove_after_s=60))
    poller = SharedPoller(watched)

    async def main() -> Update:
        patient = asyncio.ensure_future(last(poller.watch(deserted, poll_interval_s=0.2)))
        staffed = asyncio.ensure_future(last(poller.watch(attended, poll_interval_s=0.2, no_nodes_timeout_s=600)))
        given_up = await last(poller.watch(deserted, poll_interval_s=0.2, no_nodes_timeout_s=0.5))
        assert not patient.done()
        assert not staffed.done()
        patient.cancel()
        staffed.cancel()
        return given_up

    update = run(main())
    assert update.outcome is Outcome.NO_NODES
    assert "no live node of group 'default' with the step 'work' for 0.5 s" in update.message


def test_an_outage_ends_no_wait(postgres: Database, postgres_repository: JobRepository) -> None:
    add_node(postgres_repository)
    job = submit(postgres_repository, 1).job_execution_id

    with _own_user(postgres) as (database, user):
        watched = Watched(database)
        poller = SharedPoller(watched)

        async def main() -> list[Update]:
            heard: list[Update] = []

            async def listen() -> None:
                async for update in poller.watch(job, poll_interval_s=0.2):
                    heard.append(update)

            listening = asyncio.ensure_future(listen())
            await until(lambda: heard)
            await in_thread(
                run_sql,
                postgres,
                f"ALTER ROLE {user} NOLOGIN",
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'",
            )
            ticks = poller.ticks
            await until(lambda: poller.ticks >= ticks + 3)
            await in_thread(finish_all, postgres_repository, job)
            assert not listening.done()
            await in_thread(run_sql, postgres, f"ALTER ROLE {user} LOGIN")
            await listening
            return heard

        heard = run(main())
    assert heard[-1].outcome is Outcome.COMPLETED
    assert [update.message.endswith("; the wait goes on") for update in heard].count(True) == 1
    assert watched.opened >= 2


def test_a_connection_that_is_missing_for_a_while_ends_no_wait(database: Database, repository: JobRepository) -> None:
    job = submit(repository, 0).job_execution_id
    watched = Watched(database, refuse="the connection is being edited")
    poller = SharedPoller(watched)

    async def main() -> list[Update]:
        heard: list[Update] = []

        async def listen() -> None:
            async for update in poller.watch(job, poll_interval_s=0.2):
                heard.append(update)

        listening = asyncio.ensure_future(listen())
        await until(lambda: heard)
        watched.refuse = None
        await listening
        return heard

    heard = run(main())
    assert heard[0].message == "the connection is being edited; the wait goes on"
    assert heard[-1].outcome is Outcome.COMPLETED


def test_a_slow_database_does_not_hold_up_the_event_loop(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    job = submit(postgres_repository, 1).job_execution_id
    poller = SharedPoller(Watched(postgres))
    worst_s = 0.0

    async def measure() -> None:
        nonlocal worst_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, time.monotonic() - began - 0.01)

    async def main() -> None:
        waiting = asyncio.ensure_future(last(poller.watch(job, poll_interval_s=0.2)))
        await until(lambda: poller.ticks >= 2)
        engine = postgres.plain_engine()
        locker = await in_thread(engine.connect)
        try:
            await in_thread(locker.execute, text("LOCK TABLE batch_job_executions IN ACCESS EXCLUSIVE MODE"))
            ticks = poller.ticks
            measuring = asyncio.ensure_future(measure())
            await asyncio.sleep(2.0)  # the time for which the database does not answer
            measuring.cancel()
            assert poller.ticks <= ticks + 1  # it really did not
        finally:
            await in_thread(locker.close)
            await in_thread(engine.dispose)
        await in_thread(postgres_repository.executions.stop, job, reason="enough")
        assert (await waiting).outcome is Outcome.STOPPED

    run(main())
    assert worst_s < 1.0  # of two seconds; a loaded machine alone costs some tenths


def test_the_last_wait_to_leave_closes_the_connection(database: Database, repository: JobRepository) -> None:
    job = submit(repository, 0).job_execution_id
    watched = Watched(database)
    poller = SharedPoller(watched)

    async def main() -> None:
        assert (await last(poller.watch(job, poll_interval_s=0.2))).outcome is Outcome.COMPLETED
        await until(lambda: poller._task is not None and poller._task.done())
        assert poller._repository is None
        assert poller._thread is None
        assert (await last(poller.watch(job, poll_interval_s=0.2))).outcome is Outcome.COMPLETED

    run(main())
    assert watched.opened == 2


def test_a_wait_that_is_cancelled_leaves_the_others_alone(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    left, stays = (submit(repository, 1, job=name).job_execution_id for name in ("left", "stays"))
    poller = SharedPoller(Watched(database))

    async def main() -> Update:
        leaving = asyncio.ensure_future(last(poller.watch(left, poll_interval_s=0.2)))
        staying = asyncio.ensure_future(last(poller.watch(stays, poll_interval_s=0.2)))
        await until(lambda: poller.ticks >= 1)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await in_thread(finish_all, repository, left)
        await in_thread(finish_all, repository, stays)
        return await staying

    assert run(main()).outcome is Outcome.COMPLETED


def test_a_fault_of_the_poller_itself_reaches_every_wait(database: Database, repository: JobRepository) -> None:
    job = submit(repository, 1).job_execution_id

    async def broken() -> tuple[Callable[[], JobRepository], Timings]:
        def open_nothing() -> JobRepository:
            raise LookupError("a fault in the code")

        return open_nothing, Timings()

    async def main() -> list[object]:
        poller = SharedPoller(broken)
        waits = [last(poller.watch(job, poll_interval_s=0.2)) for _ in range(3)]
        return list(await asyncio.gather(*waits, return_exceptions=True))

    assert [type(error) for error in run(main())] == [LookupError] * 3


def test_one_loop_has_one_poller_for_each_connection(database: Database) -> None:
    async def main() -> SharedPoller:
        one = shared_poller("one", Watched(database))
        assert shared_poller("one", Watched(database)) is one
        assert shared_poller("other", Watched(database)) is not one
        return one

    assert run(main()) is not run(main())


@contextlib.contextmanager
def _own_user(database: Database) -> Iterator[tuple[Database, str]]:
    """The same tables, seen by a user who may be locked out."""
    user = f"poller_{secrets.token_hex(4)}"
    run_sql(
        database,
        f"CREATE ROLE {user} LOGIN SUPERUSER",
    )
    try:
        yield with_user(database, user), user
    finally:
        run_sql(
            database,
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'",
            f"DROP ROLE {user}",
        )


pytestmark = pytest.mark.timeout(120)
