"""What a shared poller is asked to wait for, and the news of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from airflow_dbpartition.domain import JobExecution
from airflow_dbpartition.waiting import NodesWanted, Outcome

LOG_PROGRESS_EVERY_S = 5.0


class News(Protocol):
    """What a wait is told."""

    @property
    def message(self) -> str: ...

    @property
    def is_last(self) -> bool: ...


@dataclass(frozen=True)
class Update:
    """News of an execution.

    Args:
        job_execution_id: the execution that is looked at now: a restart is followed.
        message: for the log.
        outcome: what the wait has come to; None = it goes on.
    """

    job_execution_id: int
    message: str
    outcome: Outcome | None = None

    @property
    def is_last(self) -> bool:
        return self.outcome is not None


@dataclass(frozen=True)
class NodesUpdate:
    """News of nodes.

    Args:
        message: for the log.
        is_last: there are enough.
    """

    message: str
    is_last: bool = False


N = TypeVar("N", bound=News)


@dataclass(eq=False, kw_only=True)
class Wait(Generic[N]):
    """One coroutine's wait; what it waits for is a subclass's."""

    poll_interval_s: float
    news: asyncio.Queue[N | BaseException] = field(default_factory=asyncio.Queue)
    is_due: bool = True  # to be looked at without waiting for the next poll
    last_message: str = ""
    last_logged: float = float("-inf")

    def notice(self, message: str) -> N:
        """News that leaves the wait as it is."""
        raise NotImplementedError

    def changed(self, message: str, now: float) -> bool:
        """Whether this is worth a line in the log: something new, and not more often than one can read."""
        if message == self.last_message or now - self.last_logged < LOG_PROGRESS_EVERY_S:
            return False
        self.last_message, self.last_logged = message, now
        return True


@dataclass(eq=False, kw_only=True)
class ExecutionWait(Wait[Update]):
    """For the end of an execution and its restarts."""

    current_id: int
    no_nodes_timeout_s: float | None
    execution: JobExecution | None = None

    def notice(self, message: str) -> Update:
        return Update(self.current_id, message)


@dataclass(eq=False, kw_only=True)
class NodesWait(Wait[NodesUpdate]):
    """For so many live nodes."""

    wanted: NodesWanted

    def notice(self, message: str) -> NodesUpdate:
        return NodesUpdate(message)
