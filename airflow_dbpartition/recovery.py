"""The rules of recovery: when a node may judge others, where lost work goes, when an execution is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from airflow_dbpartition import assignment
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import ExecutionStatus, JobSettings, NodeView, Partition
from airflow_dbpartition.errors import DbPartitionError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.losses import Rehomed
from airflow_dbpartition.repository.sessions import Presence, number_of


class Continuity:
    """Whether this process has been heard by the database without a gap for long enough to judge others.

    After an outage everybody is silent, and the first one back would evict all the others. So a process judges only
    after it has itself been heard for `remove_after_s` without a gap of `unreachable_after_s`: by then every living
    node has had its chance.
    """

    def __init__(self, timings: Timings, clock: Callable[[], float] = time.monotonic) -> None:
        self._timings = timings
        self._clock = clock
        self._since: float | None = None
        self._last: float | None = None
        self._until: datetime | None = None

    def heard(self, database_time: datetime | None = None) -> None:
        """The database has just answered, perhaps with the time by its own clock."""
        now = self._clock()
        if self._last is None or now - self._last > self._timings.unreachable_after_s:
            self._since, self._until = now, None
        self._last = now
        if database_time is not None:
            self._until = database_time + timedelta(seconds=self._timings.unreachable_after_s)

    @property
    def until(self) -> datetime | None:
        """By the database's clock: when a right to judge that is not renewed ends.

        It goes into the judging statements themselves. One that the network holds up while the database cannot be
        reached would otherwise judge on its arrival, when nobody has been heard for as long.
        """
        return self._until

    @property
    def may_judge(self) -> bool:
        now = self._clock()
        if self._since is None or self._last is None or now - self._last > self._timings.unreachable_after_s:
            return False
        return self._until is not None and now - self._since >= self._timings.remove_after_s


class Vanished:
    """Whose session has ended since the last look, as far as a process that keeps its own session can tell.

    When the server restarts, or fails over, all sessions end, and the first one back would suspect all others. So
    two looks are compared only by a node whose own session is the same one in both.
    """

    def __init__(self) -> None:
        self._own: int | None = None
        self._before: set[int] = set()

    def look(self, presence: Presence | None, node_id: str) -> set[int]:
        """Numbers of nodes that were there at the last look and are not now.

        Args:
            presence: who is there.
            node_id: who looks.
        """
        process_ids = {} if presence is None else presence.process_ids
        own = process_ids.get(number_of(node_id))
        before = self._before if own is not None and own == self._own else set()
        self._own, self._before = own, set(process_ids)
        return before - self._before


@dataclass
class SweepReport:
    """What one sweep did; `vanished` are those of the unreachable that were not silent yet."""

    vanished: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    rehomed: list[tuple[str, Rehomed]] = field(default_factory=list)
    finalised: dict[int, ExecutionStatus] = field(default_factory=dict)


class _Troubles:
    """One execution's error must not keep a sweep from the others; after a few the database itself is ill."""

    MOST = 3

    def __init__(self) -> None:
        self._errors: list[DbPartitionError] = []

    @contextmanager
    def stay_their_own(self) -> Iterator[None]:
        try:
            yield
        except DbPartitionError as error:
            self._errors.append(error)
            if len(self._errors) >= self.MOST:
                raise

    def speak(self) -> None:
        """Raise the first error, now that everything else is done."""
        if self._errors:
            raise self._errors[0]


class Recovery:
    """Sweeps and finalising. Any process may run them, any number at once, and stop half way."""

    def __init__(self, repository: JobRepository, timings: Timings) -> None:
        self._repository = repository
        self._timings = timings
        self._vanished = Vanished()

    def sweep(
        self, *, may_judge: bool, until: datetime | None = None, observer: str | None = None, deep: bool = False
    ) -> SweepReport:
        """Suspect and remove silent nodes, give away what they held, end what is over.

        Args:
            may_judge: from `Continuity`; False = only finish what others have judged.
            until: from `Continuity`; whoever judges later by the database's clock does not. None = no limit.
            observer: the node that sweeps, which also suspects nodes whose sessions have ended; None = no node does.
            deep: also look for owners that have no row at all, which reads every live partition.
        """
        report = SweepReport()
        losses = self._repository.losses
        if observer is not None:
            report.vanished = self._suspect_vanished(observer)
        if may_judge:
            report.unreachable = losses.suspect(silent_for_s=self._timings.unreachable_after_s, until=until)
            report.removed = losses.remove_silent(silent_for_s=self._timings.remove_after_s, until=until)
        gone = losses.nodes_with_orphans()
        if deep:
            gone += losses.unknown_owners()
        troubles = _Troubles()
        for node_id in gone:
            why = f"node {node_id} was lost"
            report.rehomed += [(node_id, rehomed) for rehomed in self._rehome(node_id, why, troubles)]
        for job_execution_id in self._repository.executions.failing_fast():  # who failed it died before the stop
            with troubles.stay_their_own():
                status = self.after_failure(job_execution_id)
                if status is not None and not status.is_active:
                    report.finalised[job_execution_id] = status
        for job_execution_id in self._repository.executions.unfinished_business():
            with troubles.stay_their_own():
                status = self._repository.executions.finalise(job_execution_id)
                if status is not None:
                    report.finalised[job_execution_id] = status
        troubles.speak()
        return report

    def _suspect_vanished(self, observer: str) -> list[str]:
        presence = self._repository.sessions.present()
        numbers = self._vanished.look(presence, observer)
        if presence is None or not numbers:
            return []
        gone = [node.node_id for node in self._repository.nodes.all() if number_of(node.node_id) in numbers]
        return self._repository.losses.suspect_vanished(gone, seen=presence.seen)

    def rehome(self, node_id: str, *, why: str) -> list[Rehomed]:
        """Give away everything that a removed node still holds, and finalise what that ends."""
        troubles = _Troubles()
        done = self._rehome(node_id, why, troubles)
        troubles.speak()
        return done

    def _rehome(self, node_id: str, why: str, troubles: _Troubles) -> list[Rehomed]:
        done = []
        place = partial(self.place, self._repository.nodes.all())  # read before the transaction that uses it
        for job_execution_id in self._repository.losses.executions_on(node_id):
            with troubles.stay_their_own():
                rehomed = self._repository.losses.rehome(node_id, job_execution_id, place=place, why=why)
                if rehomed.reassigned or rehomed.failed or rehomed.stopped:
                    done.append(rehomed)
                if rehomed.failed or rehomed.stopped:
                    self.after_failure(job_execution_id)
        return done

    def hand_over(self, node_id: str) -> list[Rehomed]:
        """A draining node gives away what it has not claimed, while it finishes what it runs."""
        place = partial(self.place, self._repository.nodes.all())
        return [
            self._repository.losses.rehome(
                node_id, job_execution_id, place=place, why=f"node {node_id} is draining", leaving=True
            )
            for job_execution_id in self._repository.losses.executions_on(node_id)
        ]

    def leave(self, node_id: str) -> list[Rehomed]:
        """A node leaves by itself: what it still has is re-placed at once, without waiting for a sweep."""
        self._repository.losses.deregister(node_id)
        return self.rehome(node_id, why=f"node {node_id} left")

    def place(
        self,
        nodes: Sequence[NodeView],
        node_group: str,
        step_name: str,
        settings: JobSettings,
        work: Sequence[Partition],
    ) -> dict[str, str | None]:
        """Give partitions to live nodes by the execution's own strategy; to anybody where none is live."""
        live = [
            node
            for node in nodes
            if node.may_be_given(step_name, node_group=node_group, within_s=self._timings.unreachable_after_s)
        ]
        return assignment.apply(assignment.from_json(settings.assignment), work, live)

    def after_failure(self, job_execution_id: int) -> ExecutionStatus | None:
        """Finalise if that was the last partition; with fail_fast, stop the others first."""
        execution = self._repository.reading.execution(job_execution_id)
        if execution.settings.fail_fast and execution.status.is_active and not execution.stop_requested:
            failed = self._repository.reading.failures(job_execution_id, limit=1)
            if failed:
                return self._repository.executions.stop(
                    job_execution_id, reason=f"fail_fast: partition {failed[0].partition_key!r} failed"
                )
        return self._repository.executions.finalise(job_execution_id)
