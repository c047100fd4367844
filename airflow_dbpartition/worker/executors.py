"""What the supervisor asks of whatever runs the partitions, and the one that runs them in threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.domain import Claim
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.worker.feeding import ClaimKey, Feed, key_of
from airflow_dbpartition.worker.runner import NOT_BEGUN, Outcome, run_claim
from airflow_dbpartition.worker.steps import load_steps


@dataclass(frozen=True)
class Finished:
    """A partition that is no longer running here."""

    key: ClaimKey
    outcome: Outcome


class Executor(Protocol):
    """Runs claimed partitions. Called from the supervisor's main thread, but for `kill_all`, which any thread may."""

    def start(self, wake: Callable[[], None]) -> tuple[str, ...]:
        """Make ready and return the names of the steps; `wake` is to be called when `finished` has something.

        Raises:
            ConfigurationError: the steps cannot be imported.
        """

    @property
    def free_slots(self) -> int:
        """How many more claims can be handed over now."""

    def run(self, claim: Claim) -> None: ...

    def interrupt(self, key: ClaimKey) -> None:
        """Ask a running partition to end by itself; one that waits is reported as unstarted, and never begins."""

    def kill(self, key: ClaimKey, kind: str, why: str) -> None:
        """End a running partition now; it is reported as that kind of outcome, with that text."""

    def kill_all(self, why: str) -> bool:
        """Interrupt everything now, from any thread; False where something may still run (threads)."""

    def withdraw(self) -> list[ClaimKey]:
        """Take back what has been handed over but not started."""

    def withdraw_overdue(self) -> list[ClaimKey]:
        """Take back what was handed over in the hope of a slot that has not come."""

    def started(self, key: ClaimKey) -> float | None:
        """The monotonic moment at which the step was entered; None = not yet, or not here."""

    def finished(self) -> list[Finished]: ...

    def watched(self) -> list[int]:
        """Descriptors whose readability means that `finished` has something."""

    def close(self) -> None: ...


class ThreadExecutor:
    """Runs partitions in threads of the supervisor: cheap, for steps that mostly wait; nothing can be killed.

    A killed partition's thread goes on until the step looks at `ctx.should_stop` or touches `ctx.transaction()`,
    where the fence stops it; its slot is free again only then.
    """

    def __init__(self, *, slots: int, imports: tuple[str, ...], database: DatabaseConfig, prefetch: int = 0) -> None:
        self._slots = slots
        self._imports = imports
        self._database = database
        self._feed = Feed(slots, prefetch)
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each claim handed over; False = end
        self._queue: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._threads = 0
        self._stopping: set[ClaimKey] = set()
        self._running: dict[ClaimKey, float] = {}  # since when
        self._reported: set[ClaimKey] = set()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self._repository: JobRepository | None = None

    def start(self, wake: Callable[[], None]) -> tuple[str, ...]:
        self._wake = wake
        steps = load_steps(self._imports)
        self._repository = JobRepository.connect(self._database)
        return steps

    @property
    def free_slots(self) -> int:
        with self._lock:
            return self._slots + self._feed.wanted - len(self._running) - len(self._feed)

    def run(self, claim: Claim) -> None:
        with self._lock:
            self._feed.add(claim)
            more = self._threads < min(self._slots, len(self._running) + len(self._feed))
        if more:
            self._threads += 1
            threading.Thread(target=self._work, name=f"partition-{self._threads}", daemon=True).start()
        self._turns.put(True)

    def _work(self) -> None:
        while self._turns.get():
            with self._lock:
                claim = self._feed.take()
                if claim is not None:  # else it was taken back
                    self._running[key_of(claim)] = time.monotonic()
            if claim is not None:
                self._run(claim)

    def _run(self, claim: Claim) -> None:
        assert self._repository is not None
        key = key_of(claim)
        outcome = run_claim(claim, self._repository, lambda: key in self._stopping)
        with self._lock:
            self._feed.ran(time.monotonic() - self._running.pop(key))
            self._stopping.discard(key)
            known = key in self._reported
            self._reported.discard(key)
        if not known:
            self._queue.put(Finished(key, outcome))
        self._wake()

    def interrupt(self, key: ClaimKey) -> None:
        with self._lock:
            if key in self._running:
                self._stopping.add(key)
                return
            if not self._feed.remove(key):
                return
        self._queue.put(Finished(key, NOT_BEGUN))
        self._wake()

    def kill(self, key: ClaimKey, kind: str, why: str) -> None:
        with self._lock:
            if key not in self._running or key in self._reported:
                return
            self._stopping.add(key)
            self._reported.add(key)
        self._queue.put(Finished(key, Outcome(kind, why)))
        self._wake()

    def kill_all(self, why: str) -> bool:
        del why  # a thread can only be asked
        with self._lock:
            waiting = self._feed.withdraw()
            self._stopping.update(self._running)
            ended = not self._running
        for key in waiting:
            self._queue.put(Finished(key, NOT_BEGUN))
        return ended

    def withdraw(self) -> list[ClaimKey]:
        with self._lock:
            return self._feed.withdraw()

    def withdraw_overdue(self) -> list[ClaimKey]:
        with self._lock:
            return self._feed.withdraw_overdue()

    def started(self, key: ClaimKey) -> float | None:
        with self._lock:
            return self._running.get(key)

    def finished(self) -> list[Finished]:
        done = []
        while not self._queue.empty():
            done.append(self._queue.get())
        return done

    def watched(self) -> list[int]:
        return []

    def close(self) -> None:
        self.kill_all("the worker ends")
        for _ in range(self._threads):
            self._turns.put(False)
        if self._repository is not None:
            self._repository.close()
