"""All waits of an event loop on one job repository: one thread, one connection, one query a tick."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import selectors
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from sqlalchemy import event, text

from airflow_dbpartition import polling
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import ExecutionStatus
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.polled_waits import NodesUpdate, Update
from airflow_dbpartition.polling import SharedPoller, shared_poller
from airflow_dbpartition.repository import JobRepository, sessions
from airflow_dbpartition.repository.notifications import Notifications
from airflow_dbpartition.repository.reading import Reading
from airflow_dbpartition.repository.transactions import notify
from airflow_dbpartition.schema import DONE_CHANNEL
from airflow_dbpartition.waiting import NodesWanted, Outcome
from tests.databases import Database, run_sql, with_user
from tests.scenarios import add_node, claim_one, complete, fail_all, finish_all, submit, to_nobody
from tests.worker.proxy import Proxy

PATIENCE_S = 30.0
FAR_AWAY_S = 60.0  # a poll that comes too late for any test

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


async def resting(poller: SharedPoller) -> None:
    """Wait until the poller has looked and waits for news; nothing is due before the next poll."""
    await until(lambda: poller._repository is not None and poller._notifications is not None)
    await until(lambda: poller._polled > 0 and not poller._is_due())


def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> Awaitable[T]:
    """What the test itself does to the database must not block the loop either."""
    return asyncio.to_thread(function, *args, **kwargs)


def end_all(repository: JobRepository, jobs: Sequence[int]) -> None:
    """Let many executions end in one moment, as far as a wait can tell."""
    e = repository.tables.executions
    with repository.engine.begin() as connection:
        ended = {"status": ExecutionStatus.COMPLETED.value, "active_instance_id": None}
        connection.execute(e.update().where(e.c.job_execution_id.in_(jobs)).values(ended))
        for job in jobs:
            notify(connection, DONE_CHANNEL, str(job))


def server_process_of(poller: SharedPoller) -> int:
    """Of the session that the poller has on PostgreSQL."""
    assert poller._notifications is not None
    process_id: int = poller._notifications.session.info.backend_pid
    return process_id


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever the pollers of a test hear, wanted or not."""
    heard: list[str] = []
    take = Notifications.take

    def listening(notifications: Notifications) -> set[str]:
        payloads = take(notifications)
        heard.extend(payloads)
        return payloads

    monkeypatch.setattr(Notifications, "take", listening)
    return heard


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The executions of each look."""
    looked_at: list[list[int]] = []
    progress = Reading.progress

    def looking(reading: Reading, job_execution_ids: Sequence[int]) -> Any:
        looked_at.append(list(job_execution_ids))
        return progress(reading, job_execution_ids)

    monkeypatch.setattr(Reading, "progress", looking)
    return looked_at


def test_a_hundred_waits_share_one_connection_and_one_query_a_tick(
    database: Database, repository: JobRepository
) -> None:
    jobs = [submit(repository, 1, job=f"job {number}").job_execution_id for number in range(100)]
    watched = Watched(database)
    poller = SharedPoller(watched)

    async def main() -> list[Update]:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=0.2))) for job in jobs]
        await until(lambda: poller.ticks >= 3)
        begun, queries = poller.ticks, len(watched.queries)
        await until(lambda: poller.ticks >= begun + 5)
        assert len(watched.queries) - queries <= (poller.ticks - begun) + 1
        await in_thread(end_all, repository, jobs)
        return await asyncio.gather(*waits)

    ended = run(main())
    assert [update.job_execution_id for update in ended] == jobs
    assert {update.outcome for update in ended} == {Outcome.COMPLETED}
    assert (watched.opened, watched.connects) == (1, 1)


def test_waits_for_nodes_share_the_connection_and_one_query_a_tick(
    database: Database, repository: JobRepository
) -> None:
    add_node(repository, "a")
    job = submit(repository, 1).job_execution_id
    watched = Watched(database)
    poller = SharedPoller(watched)
    wanted = [NodesWanted(2, "default"), NodesWanted(2, "default", "work"), NodesWanted(1, "other")]

    async def main() -> tuple[Update, list[str]]:
        execution = asyncio.ensure_future(last(poller.watch(job, poll_interval_s=0.2)))
        nodes = [asyncio.ensure_future(_all(poller.watch_nodes(one, poll_interval_s=0.2))) for one in wanted * 30]
        await until(lambda: poller.ticks >= 3)
        begun, queries = poller.ticks, len(watched.queries)
        await until(lambda: poller.ticks >= begun + 5)
        assert len(watched.queries) - queries <= 2 * (poller.ticks - begun) + 2
        assert not any(wait.done() for wait in nodes)
        await in_thread(add_node, repository, "b", steps=("other",))
        enough = await asyncio.gather(*nodes[::3])
        await in_thread(add_node, repository, "c")
        await in_thread(add_node, repository, "d", node_group="other")
        enough += await asyncio.gather(*nodes)
        await in_thread(end_all, repository, [job])
        return await execution, sorted({words[-1] for words in enough})

    update, words = run(main())
    assert update.outcome is Outcome.COMPLETED
    assert words == [
        "1 of 1 live nodes of group 'other'",
        "2 of 2 live nodes of group 'default'",
        "2 of 2 live nodes of group 'default' that know the step 'work'",
    ]
    assert (watched.opened, watched.connects) == (1, 1)


def test_a_wait_for_nodes_sits_out_an_outage_and_leaves_no_connection(
    database: Database, repository: JobRepository
) -> None:
    watched = Watched(database, refuse="the connection is being edited")
    poller = SharedPoller(watched)

    async def main() -> list[str]:
        waiting = asyncio.ensure_future(_all(poller.watch_nodes(NodesWanted(1, "default"), poll_interval_s=0.2)))
        await asyncio.sleep(0.5)
        watched.refuse = None
        await until(lambda: poller.ticks >= 3)
        await in_thread(add_node, repository)
        words = await waiting
        await until(lambda: poller._task is not None and poller._task.done())
        assert poller._repository is None
        return words

    words = run(main())
    assert words[0].endswith("the connection is being edited; the wait goes on")
    assert words[-1] == "1 of 1 live nodes of group 'default'"


async def _all(news: AsyncIterator[NodesUpdate]) -> list[str]:
    return [update.message async for update in news]


def test_waits_that_come_together_share_a_tick(database: Database, repository: JobRepository) -> None:
    jobs = [submit(repository, 1, job=f"job {number}").job_execution_id for number in range(30)]
    poller = SharedPoller(Watched(database))

    async def main() -> None:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=FAR_AWAY_S))) for job in jobs]
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


@pytest.mark.resilience_long
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


def test_a_loop_that_ends_while_the_poller_leaves_keeps_no_thread(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(repository)
    job = submit(repository, 1).job_execution_id
    finish_all(repository, job)
    poller, leaving = SharedPoller(Watched(database)), threading.Event()
    close = JobRepository.close

    def close_slowly(closed: JobRepository) -> None:
        leaving.set()
        time.sleep(0.3)
        close(closed)

    async def main() -> None:
        await last(poller.watch(job, poll_interval_s=0.05))
        await until(leaving.is_set)

    before = set(threading.enumerate())
    with monkeypatch.context() as slow:
        slow.setattr(JobRepository, "close", close_slowly)
        run(main())
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before


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


def test_a_wait_that_comes_later_is_looked_at_at_once(database: Database, repository: JobRepository) -> None:
    open_end = submit(repository, 1, job="open end").job_execution_id
    ended = submit(repository, 0, job="ended").job_execution_id
    poller = SharedPoller(Watched(database))

    async def main() -> None:
        first = asyncio.ensure_future(last(poller.watch(open_end, poll_interval_s=FAR_AWAY_S)))
        await resting(poller)
        assert (await last(poller.watch(ended, poll_interval_s=FAR_AWAY_S))).outcome is Outcome.COMPLETED
        assert not first.done()
        first.cancel()

    run(main())


def test_a_restart_that_is_found_ended_is_not_waited_for(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 1).job_execution_id
    fail_all(repository, first)
    second = repository.executions.restart(first, place=to_nobody).job_execution_id
    finish_all(repository, second)

    update = run(last(SharedPoller(Watched(database)).watch(first, poll_interval_s=FAR_AWAY_S)))
    assert (update.job_execution_id, update.outcome) == (second, Outcome.COMPLETED)


# --- PostgreSQL tells of ends ----------------------------------------------------------------------------------------


def test_an_end_is_heard_at_once_and_one_look_at_it_is_enough(
    postgres: Database, postgres_repository: JobRepository, looked_at: list[list[int]]
) -> None:
    add_node(postgres_repository)
    one, other = (submit(postgres_repository, 1, job=name).job_execution_id for name in ("one", "other"))
    poller = SharedPoller(Watched(postgres))

    async def main() -> None:
        first = asyncio.ensure_future(last(poller.watch(one, poll_interval_s=FAR_AWAY_S)))
        second = asyncio.ensure_future(last(poller.watch(other, poll_interval_s=FAR_AWAY_S)))
        await resting(poller)
        await in_thread(finish_all, postgres_repository, one)
        assert (await first).outcome is Outcome.COMPLETED
        assert not second.done()
        assert looked_at == [[one, other], [one]]
        second.cancel()

    run(main())


def test_a_hundred_waits_whose_ends_come_in_one_moment_cost_one_connection_and_one_look(
    postgres: Database, postgres_repository: JobRepository, heard: list[str]
) -> None:
    jobs = [submit(postgres_repository, 1, job=f"job {number}").job_execution_id for number in range(100)]
    watched = Watched(postgres)
    poller = SharedPoller(watched)

    async def main() -> list[Update]:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=FAR_AWAY_S))) for job in jobs]
        await resting(poller)
        begun = poller.ticks
        await in_thread(end_all, postgres_repository, jobs)
        ended = await asyncio.gather(*waits)
        assert poller.ticks <= begun + 2  # the packets of one moment may arrive in two
        return ended

    assert {update.outcome for update in run(main())} == {Outcome.COMPLETED}
    assert sorted(heard) == sorted(map(str, jobs))
    assert (watched.opened, watched.connects) == (1, 1)


def test_ends_that_follow_closely_share_looks(
    postgres: Database, postgres_repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "LEAST_TICK_S", 1.0)
    jobs = [submit(postgres_repository, 1, job=f"job {number}").job_execution_id for number in range(30)]
    poller = SharedPoller(Watched(postgres))

    async def main() -> None:
        waits = [asyncio.ensure_future(last(poller.watch(job, poll_interval_s=FAR_AWAY_S))) for job in jobs]
        await resting(poller)
        begun, began = poller.ticks, time.monotonic()
        for job in jobs:
            await in_thread(end_all, postgres_repository, [job])
        await asyncio.gather(*waits)
        assert poller.ticks - begun <= time.monotonic() - began + 2

    run(main())


def test_ends_of_what_nobody_here_waits_for_cause_no_look(
    postgres: Database, postgres_repository: JobRepository, heard: list[str]
) -> None:
    awaited = submit(postgres_repository, 1, job="awaited").job_execution_id
    watched = Watched(postgres)
    poller = SharedPoller(watched)

    async def main() -> None:
        waiting = asyncio.ensure_future(last(poller.watch(awaited, poll_interval_s=FAR_AWAY_S)))
        await resting(poller)
        begun, queries = poller.ticks, len(watched.queries)
        for number in range(3):
            await in_thread(submit, postgres_repository, 0, job=f"foreign {number}")  # ends at once
        await until(lambda: len(heard) == 3)
        await resting(poller)
        assert (poller.ticks, len(watched.queries)) == (begun, queries)
        await in_thread(end_all, postgres_repository, [awaited])
        assert (await waiting).outcome is Outcome.COMPLETED
        assert poller.ticks == begun + 1

    run(main())


def test_an_end_that_is_told_with_the_answers_of_a_look_is_heard(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    """The driver has then read it already, and the socket does not tell that there is something to read."""
    job = submit(postgres_repository, 1).job_execution_id

    class EndingAfterwards(SharedPoller):
        def _poll(self, repository: JobRepository, *waits: Any) -> Any:
            updates = super()._poll(repository, *waits)
            end_all(postgres_repository, [job])
            repository.nodes.all()
            return updates

    poller = EndingAfterwards(Watched(postgres))
    assert run(last(poller.watch(job, poll_interval_s=FAR_AWAY_S))).outcome is Outcome.COMPLETED


def test_an_end_while_nobody_listened_is_found_when_somebody_does_again(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    missed, later = (submit(postgres_repository, 1, job=name).job_execution_id for name in ("missed", "later"))
    watched = Watched(postgres)
    poller = SharedPoller(watched)

    async def main() -> list[str]:
        words: list[str] = []

        async def listen() -> None:
            async for update in poller.watch(later, poll_interval_s=FAR_AWAY_S):
                words.append(update.message)

        first = asyncio.ensure_future(last(poller.watch(missed, poll_interval_s=FAR_AWAY_S)))
        second = asyncio.ensure_future(listen())
        await resting(poller)
        watched.refuse = "the connection is being edited"
        await in_thread(run_sql, postgres, f"SELECT pg_terminate_backend({server_process_of(poller)})")
        await until(lambda: poller._repository is None)
        await in_thread(end_all, postgres_repository, [missed])
        watched.refuse = None
        assert (await first).outcome is Outcome.COMPLETED
        await resting(poller)
        await in_thread(end_all, postgres_repository, [later])
        await second
        return words

    words = run(main())
    assert [word.endswith("; the wait goes on") for word in words] == [False, True, False]
    assert (watched.opened, watched.connects) == (2, 2)


def test_an_end_is_found_though_the_session_was_cut_and_made_again_within_a_look(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    job = submit(postgres_repository, 1).job_execution_id
    watched = Watched(postgres)

    class Cut(SharedPoller):
        def _poll(self, repository: JobRepository, *waits: Any) -> Any:
            updates = super()._poll(repository, *waits)
            if watched.connects == 1:
                run_sql(postgres, f"SELECT pg_terminate_backend({server_process_of(self)}, 10000)")
                end_all(postgres_repository, [job])
                repository.nodes.all()
            return updates

    assert run(last(Cut(watched).watch(job, poll_interval_s=FAR_AWAY_S))).outcome is Outcome.COMPLETED
    assert (watched.opened, watched.connects) == (1, 2)


def test_a_dead_socket_does_not_keep_the_event_loop_busy(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    class Counting(selectors.DefaultSelector):
        selects = 0

        def select(self, timeout: float | None = None) -> Any:
            self.selects += 1
            return super().select(timeout)

    job = submit(postgres_repository, 1).job_execution_id
    selector = Counting()

    async def main(proxy: Proxy) -> None:
        poller = SharedPoller(Watched(Database(postgres.name, proxy.url, postgres.schema)))
        waiting = asyncio.ensure_future(last(poller.watch(job, poll_interval_s=FAR_AWAY_S)))
        await resting(poller)
        ticks, selects = poller.ticks, selector.selects
        proxy.cut()
        await asyncio.sleep(2.5)  # the time for which the socket is dead
        assert 1 <= poller.ticks - ticks <= 2
        assert selector.selects - selects < 50
        proxy.restore()
        await in_thread(end_all, postgres_repository, [job])
        assert (await waiting).outcome is Outcome.COMPLETED
        await until(lambda: poller._task is not None and poller._task.done())

    with Proxy(postgres.url) as proxy, contextlib.closing(asyncio.SelectorEventLoop(selector)) as loop:
        loop.run_until_complete(asyncio.wait_for(main(proxy), PATIENCE_S))


def test_the_last_wait_to_leave_closes_the_session_and_nobody_watches_its_socket(
    postgres: Database, postgres_repository: JobRepository
) -> None:
    job = submit(postgres_repository, 1).job_execution_id
    poller = SharedPoller(Watched(postgres))

    async def main() -> None:
        waiting = asyncio.ensure_future(last(poller.watch(job, poll_interval_s=FAR_AWAY_S)))
        await resting(poller)
        assert poller._notifications is not None
        session = poller._notifications.session
        descriptor = session.fileno()
        waiting.cancel()
        await until(lambda: poller._task is not None and poller._task.done())
        assert session.closed
        assert not asyncio.get_running_loop().remove_reader(descriptor)

    run(main())


def test_behind_a_pooler_nobody_listens_and_polling_finds_the_end(
    postgres: Database, postgres_repository: JobRepository, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    monkeypatch.setattr(sessions, "is_own", lambda _: False)
    job = submit(postgres_repository, 1).job_execution_id
    poller = SharedPoller(Watched(postgres))

    async def main() -> Update:
        waiting = asyncio.ensure_future(last(poller.watch(job, poll_interval_s=0.5)))
        await resting(poller)
        await in_thread(end_all, postgres_repository, [job])
        return await waiting

    assert run(main()).outcome is Outcome.COMPLETED
    assert heard == []


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
