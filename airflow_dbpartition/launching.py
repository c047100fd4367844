"""From a job's description to a running execution: attach, return, restart or plan, whichever is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from airflow_dbpartition import assignment
from airflow_dbpartition.assignment import AssignmentStrategy, RoundRobin, heaviest_first
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import (
    DEFAULT_NODE_GROUP,
    ExecutionStatus,
    JobExecution,
    JobIdentity,
    JobSettings,
    NodeView,
    Partition,
)
from airflow_dbpartition.errors import (
    ConfigurationError,
    InvalidPartitionError,
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionRunningError,
    NoLiveNodesError,
    UnknownStepError,
)
from airflow_dbpartition.partitioners import PartitionerEnvironment, StandaloneEnvironment
from airflow_dbpartition.partitioners.collecting import checked_partitions, partitioner_name
from airflow_dbpartition.partitioners.spooling import PartitionSpool
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository, Launched, NewExecution
from airflow_dbpartition.schema import STEP_NAME_LENGTH
from airflow_dbpartition.storable import DEFAULT_CONTEXT_LIMIT_BYTES, JsonObject

NO_NODES_CHOICES = ("wait", "fail")


class Intent(Enum):
    """Why a job is launched.

    RUN: the first try, or a retry by itself: attach when active, return when completed, restart what failed.
    CLEARED: a person wants it done (again): a completed job begins a new generation, of another what failed is
        restarted, including what was lost while it may have run.
    RERUN: a person wants all of it again: always a new generation.
    """

    RUN = "run"
    CLEARED = "cleared"
    RERUN = "rerun"


@dataclass(frozen=True)
class Job:
    """A partitioned step to be run.

    Args:
        identity: job name and identifying parameters: what is to be done once.
        step_name: the step, as workers have registered it.
        partitioner: an object with `partition(grid_size)`, or a function.
        partitions_per_node: the grid size is this times the live nodes that know the step.
        min_nodes: nodes to plan for where fewer (or none) are live.
        no_nodes: "wait" writes the partitions for whoever comes; "fail" refuses.
        strategy: how partitions are given to nodes.
        settings: how the execution is run; its `assignment` is overwritten by the strategy's JSON form.
        context_limit_bytes: how large one partition's context may be as JSON.
        timeout_s: seconds until the execution's deadline; None = none.
    """

    identity: JobIdentity
    step_name: str
    partitioner: Any
    node_group: str = DEFAULT_NODE_GROUP
    partitions_per_node: int = 1
    min_nodes: int = 1
    no_nodes: str = "wait"
    strategy: AssignmentStrategy = field(default_factory=RoundRobin)
    settings: JobSettings = field(default_factory=JobSettings)
    priority: int = 0
    manager: JsonObject = field(default_factory=dict)
    owner_token: str | None = None
    timeout_s: float | None = None
    context_limit_bytes: int = DEFAULT_CONTEXT_LIMIT_BYTES
    run_partition_key: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.step_name, str) or not 0 < len(self.step_name) <= STEP_NAME_LENGTH:
            raise ConfigurationError(f"expected step to be a name of 1 to 200 characters, got {self.step_name!r}")
        if not self.node_group or len(self.node_group) > 100:
            raise ConfigurationError(f"expected node_group to have 1 to 100 characters, got {self.node_group!r}")
        for name in ("partitions_per_node", "min_nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"expected {name} to be an integer of at least 1, got {value!r}")
        if self.no_nodes not in NO_NODES_CHOICES:
            raise ConfigurationError(f'expected no_nodes to be "wait" or "fail", got {self.no_nodes!r}')


class Launcher:
    """Launches jobs. Nothing is held in memory between calls: any process may launch, at any time, twice.

    Args:
        repository: where the job is written.
        environment: how partitioners reach databases and files.
        timings: what "live" means; the workers' own.
        stopping_timeout_s: how long to wait for an execution that is being stopped before it can be restarted.
    """

    def __init__(
        self,
        repository: JobRepository,
        *,
        environment: PartitionerEnvironment | None = None,
        timings: Timings | None = None,
        stopping_timeout_s: float | None = None,
        log: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._repository = repository
        self._environment = environment or StandaloneEnvironment(repository.engine)
        self._timings = timings or Timings()
        self._stopping_timeout_s = stopping_timeout_s or 3 * self._timings.remove_after_s
        self._recovery = Recovery(repository, self._timings)
        self._log = log

    def launch(self, job: Job, intent: Intent = Intent.RUN) -> Launched:
        """Make sure that the job is running or done, and say which execution does it.

        Raises:
            UnknownStepError: nodes are live, but none knows the step.
            NoLiveNodesError: no node is live and `no_nodes="fail"`.
            InvalidPartitionError: the partitioner's result cannot be stored; nothing was written.
            LostPartitionsError, JobAbandonedError, JobExecutionRunningError: see `Intent`.
            WaitTimeoutError: a retry after the deadline; it opens no new window.
        """
        latest = self._repository.reading.latest(job.identity.job_name, job.identity.job_key)
        if latest is None:
            return self._plan(job, generation=1)
        was_stopping = latest.status is ExecutionStatus.STOPPING
        if was_stopping:
            latest = self._wait_until_stopped(latest)
        if latest.status.is_active:
            self._log(f"attached to job execution {latest.job_execution_id}, which is {latest.status}")
            status = self._repository.executions.attach(
                latest.job_execution_id, owner_token=job.owner_token, manager=job.manager
            )
            if status in (ExecutionStatus.STOPPING, ExecutionStatus.STOPPED):  # the old try's stop was faster
                return self.launch(job, intent)
            return Launched(latest.job_execution_id, status, created=False)
        ended = {ExecutionStatus.ABANDONED}
        if not was_stopping:  # what has completed in spite of a stop was still being worked on when it was cleared
            ended.add(ExecutionStatus.COMPLETED)
        if intent is Intent.RERUN or (intent is Intent.CLEARED and latest.status in ended):
            return self._plan(job, generation=latest.generation + 1)
        if latest.status is ExecutionStatus.COMPLETED:
            self._log(f"job execution {latest.job_execution_id} has completed this job already")
            return Launched(latest.job_execution_id, latest.status, created=False)
        if latest.status is ExecutionStatus.ABANDONED:
            raise JobAbandonedError(
                f"job execution {latest.job_execution_id} was abandoned: it is not restarted by itself; "
                "clear the task to do all of it again"
            )
        return self.restart_unless_completed(
            latest.job_execution_id,
            owner_token=job.owner_token,
            manager=job.manager,
            include_lost=intent is Intent.CLEARED,
            timeout_s=job.timeout_s,
            keep_deadline=intent is Intent.RUN and job.timeout_s is not None,
        )

    def restart(
        self,
        job_execution_id: int,
        *,
        owner_token: str | None = None,
        manager: JsonObject | None = None,
        include_lost: bool = False,
        timeout_s: float | None = None,
        keep_deadline: bool = False,
    ) -> Launched:
        """Restart what failed or was stopped, on the nodes that are live now.

        Raises:
            JobExecutionNotFoundError, JobAlreadyCompleteError, JobAbandonedError, LostPartitionsError.
            JobExecutionRunningError: it is being stopped, and its workers do not let go.
            WaitTimeoutError: the deadline that is to be kept has passed.
        """
        execution = self._repository.reading.latest_of_instance(job_execution_id)
        if execution.status is ExecutionStatus.STOPPING:
            execution = self._wait_until_stopped(execution)
        nodes = self._repository.nodes.all(node_group=execution.node_group)

        def place(partitions: Sequence[Partition]) -> dict[str, str | None]:
            return self._recovery.place(
                nodes, execution.node_group, execution.step_name, execution.settings, partitions
            )

        launched = self._repository.executions.restart(
            job_execution_id,
            place=place,
            owner_token=owner_token,
            manager=manager,
            include_lost=include_lost,
            timeout_s=timeout_s,
            keep_deadline=keep_deadline,
        )
        verb = "restarted as" if launched.created else "is already running as"
        plan = ", with its stored partitions" if launched.created else ""
        self._log(f"job execution {execution.job_execution_id} {verb} {launched.job_execution_id}{plan}")
        return launched

    def restart_unless_completed(self, job_execution_id: int, **options: Any) -> Launched:
        """As `restart`; but what has completed by then, in spite of a stop or by another restart, is as good."""
        try:
            return self.restart(job_execution_id, **options)
        except JobAlreadyCompleteError:
            latest = self._repository.reading.latest_of_instance(job_execution_id)
            self._log(f"job execution {latest.job_execution_id} has completed meanwhile")
            return Launched(latest.job_execution_id, latest.status, created=False)

    def _plan(self, job: Job, *, generation: int) -> Launched:
        nodes = self._live_nodes(job)
        grid_size = max(len(nodes), job.min_nodes) * job.partitions_per_node
        with PartitionSpool(
            checked_partitions(
                job.partitioner,
                grid_size=grid_size,
                environment=self._environment,
                default_transferable=job.settings.transferable,
                context_limit_bytes=job.context_limit_bytes,
            )
        ) as spool:
            partition_count = len(spool)
            try:
                launched = self._submit(job, generation, spool, nodes)
            except InvalidPartitionError as error:  # found by the database, which does not know whom to name
                raise InvalidPartitionError(f"{partitioner_name(job.partitioner)}: {error}") from None
        if launched.created:
            self._log(
                f"job execution {launched.job_execution_id}: {partition_count} partitions for {len(nodes)} live nodes "
                f"of group {job.node_group!r} (grid size {grid_size}, generation {generation})"
            )
        return launched

    def _submit(self, job: Job, generation: int, spool: PartitionSpool, nodes: list[NodeView]) -> Launched:
        settings = JobSettings.from_json({**job.settings.to_json(), "assignment": assignment.to_json(job.strategy)})
        new = NewExecution(
            identity=job.identity,
            step_name=job.step_name,
            generation=generation,
            node_group=job.node_group,
            settings=settings,
            manager=job.manager,
            owner_token=job.owner_token,
            priority=job.priority,
            timeout_s=job.timeout_s,
            run_partition_key=job.run_partition_key,
        )
        turns = assignment.turns(job.strategy, nodes) if spool.is_uniform else None
        if turns is not None:
            return self._repository.executions.submit(new, spool, turns)
        partitions = heaviest_first(spool)  # in memory, since they are to be compared with each other
        return self._repository.executions.submit(new, partitions, assignment.apply(job.strategy, partitions, nodes))

    def _live_nodes(self, job: Job) -> list[NodeView]:
        within_s = self._timings.unreachable_after_s
        everybody = self._repository.nodes.live(node_group=job.node_group, within_s=within_s)
        able = [node for node in everybody if job.step_name in node.steps]
        if able:
            return able
        if everybody:
            known = "; ".join(f"{node.node_id} knows {', '.join(node.steps) or 'no step'}" for node in everybody)
            raise UnknownStepError(
                f"no live node of group {job.node_group!r} has registered the step {job.step_name!r} ({known}): "
                "correct the name, or deploy workers that import its module"
            )
        if job.no_nodes == "fail":
            raise NoLiveNodesError(
                f"no node of group {job.node_group!r} is live: start workers "
                f'(`dbpartition worker --node-group {job.node_group} …`), or let the job wait (no_nodes="wait")'
            )
        self._log(f"no node of group {job.node_group!r} is live: the partitions wait for whoever comes")
        return []

    def _wait_until_stopped(self, execution: JobExecution) -> JobExecution:
        """An execution that is being stopped can only be restarted once its owners have let go."""
        deadline = time.monotonic() + self._stopping_timeout_s
        self._log(f"job execution {execution.job_execution_id} is being stopped: waiting for that")
        while execution.status is ExecutionStatus.STOPPING:
            if time.monotonic() > deadline:
                raise JobExecutionRunningError(
                    f"job execution {execution.job_execution_id} is still STOPPING after "
                    f"{self._stopping_timeout_s:g} s: its workers have not let go of their partitions"
                )
            time.sleep(min(0.5, self._timings.poll_s))
            self._repository.executions.finalise(execution.job_execution_id)
            execution = self._repository.reading.latest_of_instance(execution.job_execution_id)
        return execution
