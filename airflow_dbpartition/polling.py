"""One poll for all waits of an event loop on one job repository: one thread, one connection, one query a tick.

On PostgreSQL the same connection hears of ends, so that one is seen at once. Polling goes on beside it: a notification
may be lost, and behind a pooler none is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import JobExecution, NodeView, Progress
from airflow_dbpartition.errors import DbPartitionError, JobExecutionNotFoundError
from airflow_dbpartition.polled_waits import ExecutionWait, N, News, NodesUpdate, NodesWait, Update, Wait
from airflow_dbpartition.recovery import Continuity
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.notifications import Notifications
from airflow_dbpartition.schema import DONE_CHANNEL
from airflow_dbpartition.waiting import NodesWanted, Outcome, describe_progress, sweep, why_no_nodes

SWEEP_EVERY_S = 5.0
NODES_EVERY_S = 10.0
LEAST_TICK_S = 0.02
LONGEST_BACKOFF_S = 30.0

T = TypeVar("T")

_FAULTS = (ImportError, AttributeError, NameError, TypeError)  # of a programme, which no waiting mends

Connect = Callable[[], Awaitable["tuple[Callable[[], JobRepository], Timings]"]]
"""Looks up, without blocking, where the repository is: how to open it (in the poller's thread), and the timings."""


class SharedPoller:
    """Watches executions and nodes for any number of coroutines of one event loop.

    The database is only touched in a thread of its own, so that a slow one never holds up the loop; the loop only
    watches the socket, and only while the thread rests. An outage, however long, ends no wait: the poller connects
    again, with growing pauses.

    Args:
        connect: see `Connect`; called again after each failure, since passwords change.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._timings = Timings()
        self._waits: list[Wait[Any]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._repository: JobRepository | None = None
        self._notifications: Notifications | None = None
        self._heard_on: object = None  # the session in which all waits have been looked at
        self._polled = float("-inf")
        self._continuity = Continuity(self._timings)
        self._swept = self._saw_nodes = time.monotonic()
        self.ticks = 0

    def watch(
        self, job_execution_id: int, *, poll_interval_s: float, no_nodes_timeout_s: float | None = None
    ) -> AsyncIterator[Update]:
        """News of an execution and its restarts; the last one has an outcome."""
        return self._news_of(
            ExecutionWait(
                current_id=job_execution_id, poll_interval_s=poll_interval_s, no_nodes_timeout_s=no_nodes_timeout_s
            )
        )

    def watch_nodes(self, wanted: NodesWanted, *, poll_interval_s: float) -> AsyncIterator[NodesUpdate]:
        """News of how many live nodes there are; the last one says that there are enough."""
        return self._news_of(NodesWait(wanted=wanted, poll_interval_s=poll_interval_s))

    async def _news_of(self, wait: Wait[N]) -> AsyncIterator[N]:
        self._waits.append(wait)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        try:
            while True:
                news = await wait.news.get()
                if isinstance(news, BaseException):
                    raise news
                yield news
                if news.is_last:
                    return
        finally:
            if wait in self._waits:
                self._waits.remove(wait)
            self._wake.set()

    async def _run(self) -> None:
        failures = 0
        try:
            while self._waits:
                self._wake.clear()
                began = time.monotonic()
                try:
                    await self._hear()
                    if self._is_due():
                        await self._tick()
                        await self._hear()  # what came with the answers is no longer in the socket
                    failures = 0
                except DbPartitionError as error:
                    await self._disconnect()
                    failures += 1
                    if failures == 1:
                        self._tell_all(f"{error}; the wait goes on")
                    await _sleep_until(began + min(LONGEST_BACKOFF_S, 2.0 ** min(failures, 10) / 2))
                else:
                    await self._rest()
                    await _sleep_until(began + LEAST_TICK_S)  # what comes in a burst shares a tick
        except Exception as error:  # noqa: BLE001 - a fault of ours: every wait must hear of it, or it would hang
            failed, self._waits = self._waits, []
            for wait in failed:
                wait.news.put_nowait(error)
        finally:
            try:
                await self._disconnect()
            finally:  # also where the loop ends meanwhile: what the thread has begun, it ends before it goes
                if self._thread is not None:
                    self._thread.shutdown(wait=False)
                    self._thread = None
        if self._waits:  # one came while we were leaving
            self._task = asyncio.ensure_future(self._run())

    def _is_due(self) -> bool:
        return any(wait.is_due for wait in self._waits) or self._is_poll_due()

    def _is_poll_due(self) -> bool:
        """Whether all waits are to be looked at: by the clock, or because for a while nobody listened for them."""
        listens_on = self._notifications.session if self._notifications is not None else None
        return listens_on is not self._heard_on or time.monotonic() >= self._next_poll()

    def _next_poll(self) -> float:
        return self._polled + min((wait.poll_interval_s for wait in self._waits), default=0.0)

    async def _hear(self) -> None:
        """Take what the database has said meanwhile: the waits that it names are due."""
        if self._notifications is None or self._notifications.session is None:
            return
        named = await self._in_thread(self._notifications.take)
        for wait in self._waits:
            if isinstance(wait, ExecutionWait) and str(wait.current_id) in named:
                wait.is_due = True

    async def _rest(self) -> None:
        """Until something may be due: the next poll, a word of the database, or a wait that has come or gone."""
        if self._is_due():
            return
        with contextlib.suppress(asyncio.TimeoutError), self._woken_by_the_database():
            await asyncio.wait_for(self._wake.wait(), self._next_poll() - time.monotonic())

    @contextlib.contextmanager
    def _woken_by_the_database(self) -> Iterator[None]:
        """Nobody uses the connection meanwhile, so nobody can close it while the loop watches its descriptor."""
        session = self._notifications.session if self._notifications is not None else None
        if session is None:
            yield
            return
        loop, descriptor = asyncio.get_running_loop(), session.fileno()
        loop.add_reader(descriptor, self._wake.set)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    async def _tick(self) -> None:
        self.ticks += 1
        if self._repository is None:
            self._repository = await self._in_thread(await self._opener())
            self._notifications = Notifications(self._repository.engine, DONE_CHANNEL)
        polls, began = self._is_poll_due(), time.monotonic()
        waits = [wait for wait in self._waits if polls or wait.is_due]
        for wait in waits:
            wait.is_due = False
        updates = await self._in_thread(self._poll if polls else self._look, self._repository, waits)
        if polls:
            self._polled = began
        now = time.monotonic()
        for wait, update in updates:
            if update.is_last or wait.changed(update.message, now):
                wait.news.put_nowait(update)
            if update.is_last and wait in self._waits:
                self._waits.remove(wait)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dbpartition-poll")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _opener(self) -> Callable[[], JobRepository]:
        try:
            opener, timings = await self._connect()
        except (DbPartitionError, *_FAULTS):
            raise
        except Exception as error:  # Airflow's API server or its secrets backend is away
            raise _UnavailableError(f"the connection cannot be looked up: {error}") from error
        if timings != self._timings:
            self._timings, self._continuity = timings, Continuity(timings)
        return opener

    def _tell_all(self, message: str) -> None:
        for wait in self._waits:
            wait.news.put_nowait(wait.notice(message))

    async def _disconnect(self) -> None:
        repository, self._repository = self._repository, None
        self._notifications = self._heard_on = None
        self._polled = float("-inf")
        if repository is not None:
            await self._in_thread(repository.close)

    # --- in the thread -----------------------------------------------------------------------------------------

    def _poll(self, repository: JobRepository, waits: Sequence[Wait[Any]]) -> list[tuple[Wait[Any], News]]:
        """Look at all waits, and do what is to be done from time to time."""
        now = time.monotonic()
        if now - self._swept >= SWEEP_EVERY_S:
            self._swept = now
            sweep(repository, self._timings, self._continuity)
        counted = self._count_nodes(repository, waits)
        found = self._progress(repository, waits)
        self._heard_on = self._notifications.session if self._notifications is not None else None
        updates = self._judge_all(repository, waits, found)
        if now - self._saw_nodes >= NODES_EVERY_S:
            self._saw_nodes = now
            updates = self._without_nodes(repository, updates, found)
        return [*updates, *counted]

    def _look(self, repository: JobRepository, waits: Sequence[Wait[Any]]) -> list[tuple[Wait[Any], News]]:
        counted = self._count_nodes(repository, waits)
        return [*self._judge_all(repository, waits, self._progress(repository, waits)), *counted]

    def _progress(self, repository: JobRepository, waits: Sequence[Wait[Any]]) -> dict[int, Progress]:
        wanted = sorted({wait.current_id for wait in _for_executions(waits)})
        if not wanted:
            return {}
        found = repository.reading.progress(wanted)
        self._continuity.heard()
        return found

    def _count_nodes(
        self, repository: JobRepository, waits: Sequence[Wait[Any]]
    ) -> list[tuple[NodesWait, NodesUpdate]]:
        """One query for all waits for nodes."""
        counting = [wait for wait in waits if isinstance(wait, NodesWait)]
        if not counting:
            return []
        nodes, updates = repository.nodes.all(), []
        self._continuity.heard()
        for wait in counting:
            live = wait.wanted.among(nodes, within_s=self._timings.unreachable_after_s)
            updates.append((wait, NodesUpdate(wait.wanted.describe(live), is_last=live >= wait.wanted.count)))
        return updates

    def _judge_all(
        self, repository: JobRepository, waits: Sequence[Wait[Any]], found: dict[int, Progress]
    ) -> list[tuple[ExecutionWait, Update]]:
        return [(wait, self._judge(repository, wait, found.get(wait.current_id))) for wait in _for_executions(waits)]

    def _judge(self, repository: JobRepository, wait: ExecutionWait, progress: Progress | None) -> Update:
        if progress is not None and progress.status.is_active:
            late = Outcome.LATE if progress.deadline_passed else None
            return Update(wait.current_id, describe_progress(progress), late)
        try:
            latest = repository.reading.latest_of_instance(wait.current_id)
        except JobExecutionNotFoundError as error:
            return Update(wait.current_id, str(error), Outcome.FAILED)
        if latest.job_execution_id != wait.current_id:
            old, wait.current_id, wait.execution = wait.current_id, latest.job_execution_id, latest
            wait.is_due = True  # its end may have been said before anybody here knew its number
            return Update(wait.current_id, f"job execution {old} was restarted as {wait.current_id}")
        if latest.status.is_active:  # it appeared between the two queries
            return Update(wait.current_id, f"job execution {wait.current_id} is {latest.status}")
        outcome = Outcome(latest.status.value.lower())
        return Update(wait.current_id, f"job execution {wait.current_id} is {latest.status}", outcome)

    def _without_nodes(
        self, repository: JobRepository, updates: list[tuple[ExecutionWait, Update]], found: dict[int, Progress]
    ) -> list[tuple[ExecutionWait, Update]]:
        """Look for nodes once for all waits; only where none is in sight, a wait is looked at by itself."""
        nodes = repository.nodes.all()
        judged = []
        for wait, update in updates:
            progress = found.get(wait.current_id)
            timeout_s = wait.no_nodes_timeout_s
            if update.outcome is None and timeout_s is not None and progress is not None and progress.live:
                if wait.execution is None:
                    wait.execution = repository.reading.execution(wait.current_id)
                if not _any_able(nodes, wait.execution, max(timeout_s, self._timings.unreachable_after_s)):
                    why = why_no_nodes(repository, wait.execution, no_nodes_timeout_s=timeout_s, timings=self._timings)
                    if why is not None:
                        update = Update(wait.current_id, why, Outcome.NO_NODES)
            judged.append((wait, update))
        return judged


class _UnavailableError(DbPartitionError):
    """The connection cannot be looked up now."""


def _for_executions(waits: Sequence[Wait[Any]]) -> list[ExecutionWait]:
    return [wait for wait in waits if isinstance(wait, ExecutionWait)]


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _any_able(nodes: Sequence[NodeView], execution: JobExecution, within_s: float) -> bool:
    return any(
        node.node_group == execution.node_group
        and execution.step_name in node.steps
        and node.heartbeat_age_s < within_s
        for node in nodes
    )


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, SharedPoller]] = (
    weakref.WeakKeyDictionary()
)


def shared_poller(key: Hashable, connect: Connect) -> SharedPoller:
    """The poller of the running event loop for what `key` names; the first caller's `connect` is used."""
    pollers = _pollers.setdefault(asyncio.get_running_loop(), {})
    if key not in pollers:
        pollers[key] = SharedPoller(connect)
    return pollers[key]
