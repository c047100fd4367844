"""The heartbeat: own threads, own connection; beats, listens for notifications, and fences when nobody answers."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import structlog
from sqlalchemy import event

from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.errors import DbPartitionError
from airflow_dbpartition.recovery import Continuity
from airflow_dbpartition.repository import HeartbeatReply, JobRepository, sessions
from airflow_dbpartition.repository.executions import STOP_PAYLOAD
from airflow_dbpartition.schema import WORK_CHANNEL
from airflow_dbpartition.worker.lifeline import Lifeline

log = structlog.get_logger("dbpartition.worker")


@dataclass(frozen=True)
class Beat:
    """One answered heartbeat; `sent` is the monotonic moment before it was sent."""

    node_id: str
    sent: float
    answered: float
    reply: HeartbeatReply


@contextlib.contextmanager
def _autocommit(driver_connection: Any) -> Iterator[None]:
    """What is said in the block belongs to the session, and to no transaction."""
    before = driver_connection.autocommit
    driver_connection.autocommit = True
    try:
        yield
    finally:
        driver_connection.autocommit = before


class Heartbeat:
    """Two threads: one beats and listens, the other one only watches the clock and fences.

    Args:
        database: connection settings; the statement timeout is shortened to the heartbeat's own.
        timings: intervals.
        listen: LISTEN for new work on the same connection, where the database can.
        lifeline: extended with each answered beat.
        on_fence: called once, from the watching thread, when no beat has been answered for `fence_after_s`.
        wake: called when there is news (a beat, or a notification).
    """

    def __init__(
        self,
        database: DatabaseConfig,
        timings: Timings,
        *,
        listen: bool,
        lifeline: Lifeline,
        on_fence: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        patience_s = max(1.0, timings.unreachable_after_s / 2)
        self._timings = timings
        self._lifeline = lifeline
        self._on_fence = on_fence
        self._wake_main = wake
        self._repository = JobRepository.connect(
            DatabaseConfig(
                url=database.url,
                schema=database.schema,
                connect_timeout_s=min(database.connect_timeout_s, patience_s),
                statement_timeout_s=patience_s,
                lock_timeout_s=patience_s,
                application_name="dbpartition heartbeat",
            ),
            deadline_s=patience_s,
        )
        self._listening = listen and self._repository.engine.dialect.name == "postgresql"
        self._raw: Any = None
        self._present_as: str | None = None  # None: not tried yet in this session, or not to be had
        if self._listening:
            event.listen(self._repository.engine, "connect", self._on_connect)
        self.continuity = Continuity(timings)
        self.beats: queue.SimpleQueue[Beat] = queue.SimpleQueue()
        self.notified = threading.Event()
        self._node_id = ""
        self._load: Callable[[], int] = lambda: 0
        self._draining = False
        self._last_answer = time.monotonic()
        self._fenced = False
        self._stop = threading.Event()
        self._beat_now = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        for fd in (self._wake_read, self._wake_write):
            weakref.finalize(self, os.close, fd)
        self._threads: list[threading.Thread] = []

    # --- called by the main thread -----------------------------------------------------------------------------

    def start(self, node_id: str, load: Callable[[], int]) -> None:
        """Begin to beat for a node that has just been registered."""
        self._load = load
        self.renamed(node_id)
        for target in (self._beat_for_ever, self._watch_the_clock):
            thread = threading.Thread(target=target, name=f"dbpartition-{target.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def renamed(self, node_id: str) -> None:
        """The node has been registered (again) under this id."""
        self._node_id = node_id
        self._answered(time.monotonic())

    def drain(self) -> None:
        """Say DRAINING from now on, at once."""
        self._draining = True
        self.beat_now()

    def beat_now(self) -> None:
        self._beat_now.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    @property
    def silent_for_s(self) -> float:
        """Seconds since the last answered beat."""
        return time.monotonic() - self._last_answer

    @property
    def is_listening(self) -> bool:
        return self._listening and self._raw is not None

    @property
    def is_present(self) -> bool:
        """Whether the end of this node's session would be seen by others."""
        return self._raw is not None and self._present_as == self._node_id

    def close(self) -> None:
        self._stop.set()
        self.beat_now()
        for thread in self._threads:
            thread.join(timeout=self._timings.unreachable_after_s)
        self._repository.close()

    # --- the beating thread ------------------------------------------------------------------------------------

    def _beat_for_ever(self) -> None:
        failures = 0
        while not self._stop.is_set():
            self._beat_now.clear()
            sent = time.monotonic()
            node_id = self._node_id  # the node may get another one while this is under way
            if self._present_as not in (None, node_id):
                self._reconnect()
            try:
                reply = self._repository.nodes.heartbeat(
                    node_id,
                    current_load=self._load(),
                    draining=self._draining,
                    heard_within_s=self._timings.unreachable_after_s,
                )
            except DbPartitionError as error:
                failures += 1
                log.warning("heartbeat failed", node_id=self._node_id, failures=failures, error=str(error))
            except Exception:
                failures += 1
                log.exception("heartbeat failed", node_id=self._node_id)
            else:
                if failures:
                    log.info("heartbeat is answered again", node_id=self._node_id, after_failures=failures)
                failures = 0
                if reply.status is not None:
                    self._answered(sent, datetime.fromtimestamp(reply.db_epoch_s, timezone.utc))
                self.beats.put(Beat(node_id, sent, time.monotonic(), reply))
                self._wake_main()
            self._listen_until(sent + self._timings.heartbeat_s)

    def _answered(self, sent: float, database_time: datetime | None = None) -> None:
        self._last_answer = sent
        self._fenced = False
        self._lifeline.extend_to(sent + self._timings.fence_after_s)
        self.continuity.heard(database_time)

    def _on_connect(self, driver_connection: Any, _record: object) -> None:
        """Every new connection of ours listens; the session setting survives the pool's rollback."""
        with contextlib.suppress(Exception):  # a pooler may refuse: then polling alone does it
            with _autocommit(driver_connection):
                with driver_connection.cursor() as cursor:
                    cursor.execute(f"LISTEN {WORK_CHANNEL}")
                self._present_as = self._node_id if sessions.show(driver_connection, self._node_id) else None
            self._raw = driver_connection
            self._look_for_work()  # what was said while nobody listened is said to nobody

    def _reconnect(self) -> None:
        """The session shows another name than the node has by now."""
        self._raw = self._present_as = None
        self._repository.engine.dispose()

    def _listen_until(self, moment: float) -> None:
        """Sleep until the next beat, waking the main thread for each notification on the way."""
        while not self._stop.is_set() and not self._beat_now.is_set():
            remaining = moment - time.monotonic()
            if remaining <= 0:
                return
            if self._raw is not None and self._raw.notifies:  # arrived with the answer of the beat
                self._take_notifications()
                continue
            watched: list[Any] = [self._wake_read]
            if self._raw is not None:
                watched.append(self._raw)
            try:
                readable, _, _ = select.select(watched, [], [], remaining)
            except Exception:  # the connection was closed under us
                self._raw = None
                continue
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
            if self._raw is not None and self._raw in readable:
                self._take_notifications()

    def _take_notifications(self) -> None:
        try:
            self._raw.poll()
        except Exception:  # the server closed it; the next beat makes a new one
            self._raw = None
            self._beat_now.set()
            return
        payloads = {notification.payload for notification in self._raw.notifies}
        del self._raw.notifies[:]
        if STOP_PAYLOAD in payloads:
            self._beat_now.set()  # the answer names the partitions that are asked to stop
        if payloads - {STOP_PAYLOAD}:
            self._look_for_work()

    def _look_for_work(self) -> None:
        self.notified.set()
        self._wake_main()

    # --- the watching thread -----------------------------------------------------------------------------------

    def _watch_the_clock(self) -> None:
        while not self._stop.is_set():
            remaining = self._timings.fence_after_s - self.silent_for_s
            if remaining > 0:
                self._stop.wait(min(remaining, 1.0))
                continue
            if not self._fenced:
                self._fenced = True
                self._on_fence()
                self._wake_main()
            self._stop.wait(0.2)
