"""Deciding how an attempt is settled, and keeping what could not be written yet until it is accepted or fenced."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from airflow_dbpartition.dialects import is_refused
from airflow_dbpartition.domain import Claim, TransferPolicy
from airflow_dbpartition.errors import ClaimLostError, DbPartitionError
from airflow_dbpartition.failure_texts import headline
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.settlements import Completed, lost_claim
from airflow_dbpartition.worker.logs import ids_of
from airflow_dbpartition.worker.metrics import Metrics
from airflow_dbpartition.worker.runner import COMPLETED, FAILED, INTERRUPTED, LOST, UNSTARTED, Outcome

log = structlog.get_logger("dbpartition.worker")

_RETRY_FIRST_S = 0.25
_RETRY_LONGEST_S = 5.0
_MOST_AT_ONCE = 200  # settles of one transaction: results may be large, and one that is refused refuses all


def backoff_s(claim: Claim) -> float:
    """Exponential, with jitter: from half of the delay to all of it."""
    settings = claim.settings
    longest = min(settings.retry_max_delay_s, settings.retry_delay_s * 2.0 ** min(claim.attempt - 1, 60))
    return longest * random.uniform(0.5, 1.0)


@dataclass(eq=False)
class _Pending:
    claim: Claim
    what: str
    write: Callable[[], None]
    failed: bool = False
    why: str | None = None
    retry_after_s: float | None = None
    completed: Completed | None = None  # which may be written together with others
    tries: int = 0
    not_before: float = field(default_factory=time.monotonic)


def _is_refused(error: Exception) -> bool:
    """Whether it is the values that cannot be written, however often it is tried, and not the database that is ill."""
    cause = error.__cause__ if isinstance(error, DbPartitionError) else error
    if isinstance(cause, StatementError) and not isinstance(cause, DBAPIError):
        cause = cause.orig  # what the values made of the statement, before any driver saw it
    if isinstance(cause, SQLAlchemyError):
        return is_refused(cause)
    return isinstance(cause, (TypeError, ValueError, ArithmeticError))


class Settling:
    """Turns outcomes into settles. A settle that meets a database outage is kept, and tried until it is answered."""

    def __init__(self, repository: JobRepository, recovery: Recovery, metrics: Metrics) -> None:
        self._repository = repository
        self._recovery = recovery
        self._metrics = metrics
        self._pending: list[_Pending] = []
        self._executions_to_end: dict[int, bool] = {}  # and whether one of its partitions failed
        self._written: dict[tuple[int, int], float] = {}
        self._retries_due: list[float] = []  # moments of the monotonic clock; a heap
        self.any_failed = False

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def holds(self, step_execution_id: int, version: int) -> bool:
        """Whether an unwritten settle of that claim is kept here."""
        return any(
            pending.claim.step_execution_id == step_execution_id and pending.claim.version == version
            for pending in self._pending
        )

    def written_since(self, moment: float) -> Collection[tuple[int, int]]:
        """(step_execution_id, version) of what was settled after a moment of the monotonic clock.

        Earlier settles are forgotten.
        """
        self._written = {key: when for key, when in self._written.items() if when >= moment}
        return self._written.keys()

    @property
    def next_retry(self) -> float:
        """The moment of the monotonic clock at which the next attempt after a failed one is due; inf = none waits."""
        return self._retries_due[0] if self._retries_due else float("inf")

    def take_due_retries(self, now: float) -> bool:
        """Whether any attempt has become due since this was last asked."""
        due = False
        while self.next_retry <= now:
            heapq.heappop(self._retries_due)
            due = True
        return due

    def forget_all(self) -> None:
        """The node was removed: every one of its claims is gone."""
        for pending in self._pending:
            log.warning("settle dropped: the node was removed", what=pending.what, **ids_of(pending.claim))
        self._pending.clear()

    def settle(self, claim: Claim, outcome: Outcome, *, stop_requested: bool) -> None:
        """Decide what an outcome means for the partition, and write it (now, or as soon as the database answers)."""
        settlements = self._repository.settlements
        if outcome.kind == LOST:
            self._metrics.claims_lost.inc()
            log.warning("claim lost, work dropped", reason=outcome.message, **ids_of(claim))
            return
        if outcome.kind == COMPLETED:
            self._pending.append(
                _Pending(
                    claim,
                    "completed",
                    lambda: settlements.complete(claim, counters=outcome.counters, result=outcome.result),
                    completed=Completed(claim, outcome.counters, outcome.result),
                )
            )
        elif outcome.kind in (INTERRUPTED, UNSTARTED) and stop_requested:
            self._pending.append(_Pending(claim, "stopped", lambda: settlements.stop(claim)))
        elif outcome.kind in (INTERRUPTED, UNSTARTED):
            self.give_back(claim, why=outcome.message, started=outcome.kind == INTERRUPTED)
        elif claim.retries_left > 0:
            delay_s = backoff_s(claim)
            self._pending.append(
                _Pending(
                    claim,
                    "retried",
                    lambda: settlements.retry(claim, message=outcome.message, delay_s=delay_s),
                    why=outcome.message,
                    retry_after_s=delay_s,
                )
            )
        else:
            self._pending.append(
                _Pending(
                    claim,
                    "failed",
                    lambda: settlements.fail(claim, message=outcome.message),
                    failed=True,
                    why=outcome.message,
                )
            )

    def give_back(self, claim: Claim, *, why: str, started: bool) -> None:
        """Release what never started or may run twice; fail what may have run and may not run again."""
        settlements = self._repository.settlements
        if started and claim.transfer_policy is not TransferPolicy.ALWAYS:
            message = f"interrupted while it ran ({why}); not transferable, so not run again"
            self._pending.append(
                _Pending(
                    claim,
                    "failed",
                    lambda: settlements.fail(claim, message=message, lost=True),
                    failed=True,
                    why=message,
                )
            )
        else:
            self._pending.append(_Pending(claim, "released", lambda: settlements.release(claim, message=why)))

    def flush(self) -> None:
        """Write what is due, and end the executions that are over by it. Never raises."""
        self.write_due()
        self.end_executions()

    def write_due(self) -> None:
        """Write what is due, and leave executions to `end_executions`. What the database does not answer is kept.

        What has ended well while the last flush was under way is written together, in one transaction: a lone one
        waits for nobody.
        """
        now = time.monotonic()
        due = [pending for pending in self._pending if pending.not_before <= now]
        together = [pending for pending in due if pending.completed is not None and pending.tries == 0]
        for first in range(0, len(together), _MOST_AT_ONCE):
            group = together[first : first + _MOST_AT_ONCE]
            if len(group) > 1:
                self._write_together(group)
        unwritten = set(self._pending)
        for pending in due:
            if pending in unwritten:
                self._write(pending)

    def _write_together(self, group: list[_Pending]) -> None:
        """All or none of them; where none, each is still to be written alone, and shows which is to blame."""
        completed = [pending.completed for pending in group if pending.completed is not None]
        try:
            lost = {id(claim) for claim in self._repository.settlements.complete_all(completed)}
        except Exception as error:
            log.warning("settles not written together", count=len(group), error=str(error))
            return
        for pending in group:
            if id(pending.claim) in lost:
                self._lost(pending, str(lost_claim(pending.claim)))
            else:
                self._wrote(pending)
        written = set(group)
        self._pending = [pending for pending in self._pending if pending not in written]

    def _write(self, pending: _Pending) -> None:
        try:
            pending.write()
        except ClaimLostError as error:
            self._lost(pending, str(error))
        except Exception as error:
            if pending.completed is not None and _is_refused(error):
                self._pending.remove(pending)
                message = f"the step ended well, but its outcome cannot be stored: {error}"
                self.settle(pending.claim, Outcome(FAILED, message), stop_requested=False)
                return
            pending.tries += 1
            wait = min(_RETRY_LONGEST_S, _RETRY_FIRST_S * 2 ** min(pending.tries, 8))
            pending.not_before = time.monotonic() + wait
            log.warning(
                "settle not written yet", what=pending.what, error=str(error), retry_in_s=wait, **ids_of(pending.claim)
            )
            return
        else:
            self._wrote(pending)
        self._pending.remove(pending)

    def _lost(self, pending: _Pending, reason: str) -> None:
        self._metrics.claims_lost.inc()
        log.warning("claim lost, outcome dropped", what=pending.what, reason=reason)

    def _wrote(self, pending: _Pending) -> None:
        self.any_failed = self.any_failed or pending.failed
        self._metrics.settled.labels(pending.what).inc()
        level = log.warning if pending.what in ("failed", "retried") else log.info
        why = {} if pending.why is None else {"error": headline(pending.why)}
        level(f"partition {pending.what}", **ids_of(pending.claim), **why)
        self._written[(pending.claim.step_execution_id, pending.claim.version)] = time.monotonic()
        if pending.retry_after_s is not None:
            heapq.heappush(self._retries_due, time.monotonic() + pending.retry_after_s)
        execution_id = pending.claim.job_execution_id
        self._executions_to_end[execution_id] = self._executions_to_end.get(execution_id, False) or pending.failed

    def end_executions(self, still_running: Collection[int] = ()) -> None:
        """End what is over, after the commit of its settles; if this process dies between, any sweep does it.

        Args:
            still_running: executions of which this node runs a partition. They are not over, so nobody looks.
        """
        for job_execution_id, failed in list(self._executions_to_end.items()):
            if job_execution_id in still_running and not failed:
                continue
            del self._executions_to_end[job_execution_id]
            try:
                status = (
                    self._recovery.after_failure(job_execution_id)
                    if failed
                    else self._repository.executions.finalise(job_execution_id)
                )
            except DbPartitionError as error:
                log.warning("finalising is left to a sweep", job_execution_id=job_execution_id, error=str(error))
                continue
            if status is not None:
                log.info("job execution ended", job_execution_id=job_execution_id, status=status.value)
