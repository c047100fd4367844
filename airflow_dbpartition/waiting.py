"""What is to be said of an execution that somebody waits for: one verdict for every way of waiting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import ExecutionStatus, JobExecution, NodeView, PartitionStatus, Progress
from airflow_dbpartition.failure_texts import essence
from airflow_dbpartition.recovery import Continuity, Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.reading import Failure
from airflow_dbpartition.storable import JsonObject

NAMED_FAILURES = 10
TAIL_LINES = 3
TAIL_CHARS = 400


class Outcome(Enum):
    """How a wait stands. LATE: past the execution's deadline; NO_NODES: nobody has been there to do the work."""

    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    ABANDONED = "abandoned"
    LATE = "late"
    NO_NODES = "no_nodes"


@dataclass(frozen=True)
class Verdict:
    """What one look at the database showed.

    Args:
        outcome: whether the wait is over, and how.
        execution: the one that is waited for: the latest of its instance.
        message: why, in words for the task's log; while waiting, the progress.
        summary: of an execution that has ended, what goes into XCom.
    """

    outcome: Outcome
    execution: JobExecution
    message: str
    summary: JsonObject | None = None

    @property
    def job_execution_id(self) -> int:
        return self.execution.job_execution_id

    @property
    def is_final(self) -> bool:
        return self.outcome is not Outcome.WAITING


@dataclass(frozen=True)
class NodesWanted:
    """How many live nodes somebody waits for.

    Args:
        count: how many.
        node_group: of which group.
        step: that they have to know; None = any.
    """

    count: int
    node_group: str
    step: str | None = None

    def among(self, nodes: Iterable[NodeView], *, within_s: float) -> int:
        """How many of the nodes are such, heard within so many seconds."""
        return sum(node.may_be_given(self.step, node_group=self.node_group, within_s=within_s) for node in nodes)

    def describe(self, live: int) -> str:
        """How many there are, in one line for the task's log."""
        knowing = "" if self.step is None else f" that know the step {self.step!r}"
        return f"{live} of {self.count} live nodes of group {self.node_group!r}{knowing}"


def look(
    repository: JobRepository,
    job_execution_id: int,
    *,
    no_nodes_timeout_s: float | None = None,
    timings: Timings | None = None,
) -> Verdict:
    """Judge by what the database says now, and by nothing else: any process may look, at any time.

    Args:
        job_execution_id: any execution of the instance; the latest one, its last restart, is what counts.
        no_nodes_timeout_s: seconds without any live node after which pending work is given up; None = never.

    Raises:
        JobExecutionNotFoundError: there is no such execution (any more).
        DatabaseError: the database refused.
    """
    while True:
        execution = repository.reading.latest_of_instance(job_execution_id)
        progress = repository.reading.progress([execution.job_execution_id]).get(execution.job_execution_id)
        if progress is None:
            continue  # purged between the two: the next look says so
        if progress.status.is_active:
            return _while_active(repository, execution, progress, no_nodes_timeout_s, timings or Timings())
        if progress.status is ExecutionStatus.COMPLETED:
            return _completed(repository, execution, progress)
        latest = repository.reading.latest_of_instance(job_execution_id)
        if latest.job_execution_id == execution.job_execution_id:
            return _unsuccessful(repository, latest, progress)


def sweep(repository: JobRepository, timings: Timings, continuity: Continuity | None = None) -> None:
    """Do what any worker would: finish what is over and, after an unbroken presence, judge nodes.

    So an execution ends even where no worker is left to end it.
    """
    recovery = Recovery(repository, timings)
    if continuity is None:
        recovery.sweep(may_judge=False)
    else:
        continuity.heard(repository.nodes.clock())
        recovery.sweep(may_judge=continuity.may_judge, until=continuity.until)


def describe_progress(progress: Progress) -> str:
    """The counts in one line, as the task's log shows them."""
    counts = progress.counts
    words = [f"{progress.done}/{progress.total} partitions done"]
    for status, word in (
        (PartitionStatus.CLAIMED, "running"),
        (PartitionStatus.PENDING, "waiting"),
        (PartitionStatus.FAILED, "failed"),
        (PartitionStatus.STOPPED, "stopped"),
    ):
        if counts.get(status):
            words.append(f"{counts[status]} {word}")
    ending = ", stopping" if progress.stop_requested else ""
    return f"job execution {progress.job_execution_id}: {', '.join(words)}{ending}"


def why_no_nodes(
    repository: JobRepository, execution: JobExecution, *, no_nodes_timeout_s: float, timings: Timings
) -> str | None:
    """Why nobody will do the pending work, or None while there is hope.

    The silence is measured by the database: since the last heartbeat of any node that could do it, or since the
    execution was written. So it needs no memory, and a retry does not begin it anew.
    """
    group, step = execution.node_group, execution.step_name
    able = [node for node in repository.nodes.all(node_group=group) if step in node.steps]
    patience_s = max(no_nodes_timeout_s, timings.unreachable_after_s)
    if any(node.heartbeat_age_s < patience_s for node in able):
        return None
    if repository.reading.age_s(execution.job_execution_id) < patience_s:
        return None
    gone = [node for node in repository.nodes.all(node_group=group, include_removed=True) if step in node.steps]
    if any(node.heartbeat_age_s < patience_s for node in gone):
        return None
    others = repository.nodes.live(node_group=group, within_s=timings.unreachable_after_s)
    known = f"; the {len(others)} live node(s) of the group do not know the step" if others else ""
    return (
        f"no live node of group {group!r} with the step {step!r} for {no_nodes_timeout_s:g} s{known}: start workers "
        f"(`dbpartition worker --node-group {group} …`). The partitions wait for them"
    )


def _while_active(
    repository: JobRepository,
    execution: JobExecution,
    progress: Progress,
    no_nodes_timeout_s: float | None,
    timings: Timings,
) -> Verdict:
    text = describe_progress(progress)
    if progress.deadline_passed:
        return Verdict(Outcome.LATE, execution, f"the deadline ({execution.deadline}) has passed: {text}")
    if no_nodes_timeout_s is not None and progress.live:
        why = why_no_nodes(repository, execution, no_nodes_timeout_s=no_nodes_timeout_s, timings=timings)
        if why is not None:
            return Verdict(Outcome.NO_NODES, execution, f"{text}; {why}")
    return Verdict(Outcome.WAITING, execution, text)


def _completed(repository: JobRepository, execution: JobExecution, progress: Progress) -> Verdict:
    """COMPLETED is only believed when every single partition is."""
    summary = repository.reading.summary(execution.job_execution_id)
    completed = progress.counts.get(PartitionStatus.COMPLETED, 0)
    believable = completed == progress.total == execution.partition_count
    if believable and summary.counts["completed"] == summary.counts["total"]:
        return Verdict(Outcome.COMPLETED, execution, describe_progress(progress), summary.to_json())
    return Verdict(
        Outcome.FAILED,
        execution,
        f"job execution {execution.job_execution_id} is marked COMPLETED, but its partitions are not "
        f"({describe_progress(progress)}; {execution.partition_count} were planned): somebody changed the tables",
    )


def _unsuccessful(repository: JobRepository, execution: JobExecution, progress: Progress) -> Verdict:
    summary = repository.reading.summary(execution.job_execution_id).to_json()
    name = f"job execution {execution.job_execution_id} ({execution.job_name})"
    if progress.status is ExecutionStatus.ABANDONED:
        text = f"{name} was abandoned: it is never restarted by itself"
        return Verdict(Outcome.ABANDONED, execution, text, summary)
    if progress.status is ExecutionStatus.STOPPED:
        why = execution.exit_message or "stopped on request"
        text = f"{name} was stopped ({why}): {describe_progress(progress)}"
        return Verdict(Outcome.STOPPED, execution, text, summary)
    failed = progress.counts.get(PartitionStatus.FAILED, 0)
    failures = repository.reading.failures(execution.job_execution_id, limit=NAMED_FAILURES)
    lines = [f"{name} FAILED: {failed} of {progress.total} partitions failed", *map(_failure_line, failures)]
    if failed > len(failures):
        lines.append(f"  and {failed - len(failures)} more")
    shown_by = f"`dbpartition job {execution.job_execution_id}`"
    lines.append(f"  {shown_by} shows all of it; a clear of the task that launched it runs what failed again")
    return Verdict(Outcome.FAILED, execution, "\n".join(lines), summary)


def _failure_line(failure: Failure) -> str:
    tail = "\n".join(essence(failure.message, lines=TAIL_LINES) or ["no message"])
    if len(tail) > TAIL_CHARS:
        tail = f"{tail[: TAIL_CHARS // 4]} … {tail[-3 * TAIL_CHARS // 4 :]}"
    indented = tail.replace("\n", "\n      ")
    return f"  {failure.partition_key} on {failure.node_id} (attempt {failure.attempt}): {indented}"
