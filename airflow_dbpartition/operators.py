"""PartitionedStepOperator: splits a step into partitions for the worker nodes that are alive, and may wait for them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_dbpartition import templated
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP, JOB_NAME_LENGTH, ExecutionStatus, JobIdentity, JobSettings
from airflow_dbpartition.errors import ConfigurationError, JobExecutionNotFoundError
from airflow_dbpartition.hooks import DEFAULT_CONN_ID, AirflowEnvironment, opened
from airflow_dbpartition.maintenance import PurgeJobRepositoryOperator, StopJobExecutionOperator
from airflow_dbpartition.ownership import describe, map_index_of, owner_token, same_task, was_cleared
from airflow_dbpartition.partitioners.collecting import as_partitioner
from airflow_dbpartition.partitioners.function import FunctionPartitioner
from airflow_dbpartition.storable import DEFAULT_CONTEXT_LIMIT_BYTES
from airflow_dbpartition.task_outcome import airflow_errors
from airflow_dbpartition.task_wait import DEFERRAL_GRACE_S, TaskWait

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

    from airflow_dbpartition.aggregating import Aggregator
    from airflow_dbpartition.connections import RepositoryAddress
    from airflow_dbpartition.launching import Intent, Job
    from airflow_dbpartition.repository import JobRepository
    from airflow_dbpartition.waiting import Verdict

__all__ = ["PartitionedStepOperator", "PurgeJobRepositoryOperator", "StopJobExecutionOperator"]


_READERS: dict[str, templated.Reader] = {
    "step": templated.text(200),
    "partitions_per_node": templated.integer(1),
    "min_nodes": templated.integer(1),
    "no_nodes": templated.one_of("wait", "fail"),
    "node_group": templated.text(100),
    "transferable": templated.transfer_policy,
    "assignment": templated.assignment,
    "stealing": templated.flag,
    "partition_retries": templated.integer(0),
    "partition_retry_delay": templated.delay_s,
    "partition_retry_max_delay": templated.delay_s,
    "max_node_losses": templated.integer(1),
    "partition_timeout": templated.optional(templated.duration_s),
    "fail_fast": templated.flag,
    "priority": templated.integer(-1_000_000),
    "job_name": templated.optional(templated.text(JOB_NAME_LENGTH)),
    "job_parameters": templated.optional(templated.json_object),
    "on_clear": templated.one_of("restart", "rerun"),
    "if_complete": templated.one_of("return", "fail", "rerun"),
    "context_limit_bytes": templated.integer(1),
    "timeout": templated.optional(templated.duration_s),
    "poll_interval": templated.duration_s,
    "no_nodes_timeout": templated.optional(templated.duration_s),
    "on_sigterm": templated.one_of("detach", "stop"),
    "wait_for_completion": templated.flag,
    "repository_conn_id": templated.conn_id,
}


class PartitionedStepOperator(TaskWait):
    """Writes one PENDING partition for each slice of a step; workers outside Airflow run them.

    Without `wait_for_completion` it ends once the plan is written, and returns the job execution's id for a
    `PartitionCompletionSensor`. With it, it ends when the last partition has, and returns the summary.

    A **retry** attaches to an execution that still runs, returns one that has completed, and restarts what failed.
    After a person's **clear** a completed job is done again (a new generation); of another, what failed is restarted.

    Every argument may be a template, the partitioner's own included.

    Args:
        step: the name under which workers have registered the step.
        partitioner: an object with `partition(grid_size)`, a function of grid_size or of nothing, a mapping of key to
            context, a list of contexts, or another task's output of these.
        partitions_per_node: partitions for each live node: the grid size is this times the nodes.
        min_nodes: nodes to plan for where fewer, or none, are live.
        no_nodes: "wait" writes the partitions for whoever comes; "fail" refuses when no node is live.
        node_group: whose nodes do the work.
        transferable: True: idempotent, may run again when its node is lost; False: never moves; "until_started": moves
            until a node has claimed it, and never after. So by default nothing runs twice.
        assignment: "round_robin", "least_loaded", "unassigned", or an object with `assign(partitions, nodes)`.
        stealing: an idle node may take a transferable partition that has not started from a busy one.
        partition_retries: further attempts at a partition after an exception.
        partition_retry_delay: before the first of them; it doubles (timedelta or seconds).
        partition_retry_max_delay: the longest of them (timedelta or seconds).
        max_node_losses: a partition that has lost so many nodes fails, as poison.
        partition_timeout: one attempt's longest time (timedelta or seconds); None = no limit.
        fail_fast: stop the execution at the first failed partition.
        priority: higher ones are claimed first.
        job_name: the job's name; by default `dag_id.task_id`.
        job_parameters: what identifies the job beside its name; by default the run and the map index. Never rely on
            `ds` or `logical_date`: a run without a logical date has neither.
        on_clear: "restart": see above; "rerun": a clear always does all of it again.
        if_complete: what a first try does with a job that another task or run has completed, which `job_parameters`
            make possible: "return" it, "fail", or "rerun": do it again, as a new generation. One that still runs is
            attached to.
        aggregator: with `wait_for_completion`: a function of the results (an iterator of partition key and result,
            read page by page), or "package.module:function"; what it returns is the task's return value.
        repository_conn_id: the Airflow connection of the job repository.
        context_limit_bytes: how large one partition's context may be, as JSON.
        timeout: from the launch on (timedelta or seconds). The moment is stored with the execution: retries and resumes
            open no fresh window. Whoever waits stops the execution then, and the task fails without a retry.
        wait_for_completion: wait for the end.
        deferrable: wait in the triggerer; by default as Airflow's `[operators] default_deferrable` says.
        poll_interval: between two looks while waiting (timedelta or seconds).
        no_nodes_timeout: while waiting: fail when there was no live node for so long with work pending (timedelta or
            seconds); the partitions stay. None = never.
        on_sigterm: while waiting in a worker's slot that is drained: "detach" leaves the execution running, and the
            retry attaches to it; "stop" stops it. A person's kill always stops it.
    """

    template_fields: Sequence[str] = ("partitioner", *_READERS)
    template_fields_renderers = {"job_parameters": "json"}  # noqa: RUF012 - Airflow's own declaration
    ui_color = "#dcecf7"
    _readers = _READERS

    def __init__(
        self,
        *,
        step: str,
        partitioner: Any,
        partitions_per_node: int | str = 1,
        min_nodes: int | str = 1,
        no_nodes: str = "wait",
        node_group: str = DEFAULT_NODE_GROUP,
        transferable: bool | str = "until_started",
        assignment: Any = "round_robin",
        stealing: bool | str = True,
        partition_retries: int | str = 0,
        partition_retry_delay: timedelta | float | str = 1.0,
        partition_retry_max_delay: timedelta | float | str = 300.0,
        max_node_losses: int | str = 3,
        partition_timeout: timedelta | float | str | None = None,
        fail_fast: bool | str = False,
        priority: int | str = 0,
        job_name: str | None = None,
        job_parameters: Mapping[str, Any] | None = None,
        on_clear: str = "restart",
        if_complete: str = "return",
        aggregator: Aggregator | str | None = None,
        repository_conn_id: str = DEFAULT_CONN_ID,
        context_limit_bytes: int | str = DEFAULT_CONTEXT_LIMIT_BYTES,
        timeout: timedelta | float | str | None = None,
        wait_for_completion: bool | str = False,
        deferrable: bool | None = None,
        poll_interval: timedelta | float | str = 5.0,
        no_nodes_timeout: timedelta | float | str | None = 1800.0,
        on_sigterm: str = "detach",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.step = step
        with self._naming_itself():
            self.partitioner = _checked_partitioner(partitioner)
        self.partitions_per_node = partitions_per_node
        self.min_nodes = min_nodes
        self.no_nodes = no_nodes
        self.node_group = node_group
        self.transferable = transferable
        self.assignment = assignment
        self.stealing = stealing
        self.partition_retries = partition_retries
        self.partition_retry_delay = partition_retry_delay
        self.partition_retry_max_delay = partition_retry_max_delay
        self.max_node_losses = max_node_losses
        self.partition_timeout = partition_timeout
        self.fail_fast = fail_fast
        self.priority = priority
        self.job_name = job_name
        self.job_parameters = job_parameters
        self.on_clear = on_clear
        self.if_complete = if_complete
        self.aggregator = self._checked_aggregator(aggregator)
        if aggregator is not None and wait_for_completion in (False, "false", "False"):
            raise ConfigurationError(
                f"task {self.task_id!r}: the aggregator would never be called: set wait_for_completion=True, or give "
                "it to the PartitionCompletionSensor"
            )
        self.repository_conn_id = repository_conn_id
        self.context_limit_bytes = context_limit_bytes
        self.timeout = timeout
        self.wait_for_completion = wait_for_completion
        self.deferrable = self._is_deferrable(deferrable)
        self.poll_interval = poll_interval
        self.no_nodes_timeout = no_nodes_timeout
        self.on_sigterm = on_sigterm
        self._refuse_what_is_known()
        for holder in (self.partitioner, self.assignment):  # Airflow only looks at the operator's own fields
            for name in getattr(holder, "template_fields", ()):
                XComArg.apply_upstream_relationship(self, getattr(holder, name, None))

    # --- Airflow's entry points --------------------------------------------------------------------------------

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        """Render copies of the objects that hold templates: they are shared by all runs in this process."""
        self.partitioner = copy.copy(self.partitioner)
        self.assignment = copy.copy(self.assignment)
        super().render_template_fields(context, jinja_env)

    def execute(self, context: Context) -> Any:
        """Launch, and wait where that is asked for.

        Returns:
            The job execution's id; with `wait_for_completion` the summary (counts, summed counters).
        """
        with airflow_errors():
            address = self._hook().address()
            with opened(address) as repository:
                job_execution_id = self._launch(repository, address, context)
                waits = self._value("wait_for_completion")
                self._heed_sigterm(context, job_execution_id, is_leaving=self.deferrable or not waits)
                if not waits:
                    return job_execution_id
                if not self.deferrable:
                    return self._wait(repository, address, context, job_execution_id)
                verdict = self._look(repository, address, job_execution_id)
            deadline = verdict.execution.deadline
            give_up_at = None if deadline is None else deadline + timedelta(seconds=DEFERRAL_GRACE_S)
            return self._conclude_or_defer(context, address, verdict, give_up_at)

    # --- launching ---------------------------------------------------------------------------------------------

    def _launch(self, repository: JobRepository, address: RepositoryAddress, context: Context) -> int:
        from airflow_dbpartition.launching import Launcher

        job = self._job(context)
        launcher = Launcher(
            repository,
            environment=AirflowEnvironment(repository),
            timings=address.timings,
            log=self.log.info,
        )
        launched = launcher.launch(job, self._intent(repository, job, context))
        self.log.info("job execution %d of %r is %s", launched.job_execution_id, job.identity.job_name, launched.status)
        self._show(context, launched.job_execution_id, job_name=job.identity.job_name)
        return launched.job_execution_id

    def _job(self, context: Context) -> Job:
        from airflow_dbpartition.launching import Job

        ti: Any = context["ti"]
        values = {name: self._value(name) for name in self._readers}
        with self._naming_itself():
            partitioner = _as_partitioner(self.partitioner)
        settings = JobSettings(
            transferable=values["transferable"].value,
            stealing=values["stealing"],
            partition_retries=values["partition_retries"],
            retry_delay_s=values["partition_retry_delay"],
            retry_max_delay_s=values["partition_retry_max_delay"],
            max_node_losses=values["max_node_losses"],
            partition_timeout_s=values["partition_timeout"],
            fail_fast=values["fail_fast"],
        )
        return Job(
            identity=self._identity(context),
            step_name=values["step"],
            partitioner=partitioner,
            node_group=values["node_group"],
            partitions_per_node=values["partitions_per_node"],
            min_nodes=values["min_nodes"],
            no_nodes=values["no_nodes"],
            strategy=values["assignment"],
            settings=settings,
            priority=values["priority"],
            manager={
                **describe(ti, retries=self._retries()),
                "timeout_s": values["timeout"],
                **({"input": _fingerprint(values["step"], self.partitioner)} if map_index_of(ti) >= 0 else {}),
            },
            owner_token=owner_token(ti),
            timeout_s=values["timeout"],
            context_limit_bytes=values["context_limit_bytes"],
            run_partition_key=getattr(context["dag_run"], "partition_key", None),
        )

    def _identity(self, context: Context) -> JobIdentity:
        ti: Any = context["ti"]
        name = self._value("job_name") or _shortened(f"{ti.dag_id}.{ti.task_id}")
        parameters = self._value("job_parameters")
        if parameters is None:
            parameters = {"run_id": ti.run_id, "map_index": map_index_of(ti)}
        return JobIdentity(name, parameters)

    def _intent(self, repository: JobRepository, job: Job, context: Context) -> Intent:
        from airflow_dbpartition.launching import Intent

        ti: Any = context["ti"]
        latest = repository.reading.latest(job.identity.job_name, job.identity.job_key)
        if latest is None:
            return Intent.RUN
        mine = same_task(latest.manager, ti)
        if mine and latest.manager.get("input") != job.manager.get("input"):
            reason = f"map index {map_index_of(ti)} has another input now"
            self.log.warning("job execution %d is superseded: %s", latest.job_execution_id, reason)
            repository.executions.stop(latest.job_execution_id, reason=reason)
            return Intent.RERUN
        if was_cleared(latest.manager, ti, retries=self._retries()):
            self.log.info("the task was cleared since job execution %d was launched", latest.job_execution_id)
            return Intent.RERUN if self._value("on_clear") == "rerun" else Intent.CLEARED
        if mine or latest.status is not ExecutionStatus.COMPLETED:
            return Intent.RUN
        if self._value("if_complete") == "fail":
            raise AirflowFailException(
                f"job execution {latest.job_execution_id} has completed job {job.identity.job_name!r} with the same "
                f'parameters already, in run {latest.manager.get("run_id")!r}: if_complete="fail" refuses a second one'
            )
        return Intent.RERUN if self._value("if_complete") == "rerun" else Intent.RUN

    def _retries(self) -> int:
        return self.retries or 0

    # --- waiting -----------------------------------------------------------------------------------------------

    def _poll_interval_s(self) -> float:
        return float(self._value("poll_interval"))

    def _awaited(self, repository: JobRepository, context: Context) -> int:
        identity = self._identity(context)
        latest = repository.reading.latest(identity.job_name, identity.job_key)
        if latest is None:
            raise JobExecutionNotFoundError(f"job {identity.job_name!r} has no execution (any more)")
        return latest.job_execution_id

    def _conclude(self, context: Context, verdict: Verdict) -> Any:
        from airflow_dbpartition.waiting import Outcome

        self._report(context, verdict)
        if verdict.outcome is Outcome.COMPLETED:
            return self._result(verdict)
        if verdict.outcome is Outcome.LATE:
            self._give_up(context, verdict, "its deadline has passed")
        if verdict.outcome in (Outcome.STOPPED, Outcome.ABANDONED):  # a person's word; a retry must not undo it
            raise AirflowFailException(verdict.message)
        raise AirflowException(verdict.message)

    def _give_up(self, context: Context, verdict: Verdict, why: str) -> NoReturn:
        stopped = self._stop(context, verdict.job_execution_id, why)
        raise AirflowFailException(f"{why}: {verdict.message}; {stopped}")


def _fingerprint(step: str, partitioner: Any) -> str:
    """What the work of a mapped task is: a map index may get another input, and must not resume the old one's job."""
    fields = getattr(partitioner, "template_fields", ())
    what = {name: getattr(partitioner, name) for name in fields} if fields else partitioner
    words = json.dumps([step, type(partitioner).__qualname__, what], sort_keys=True, default=repr)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _shortened(name: str) -> str:
    if len(name) <= JOB_NAME_LENGTH:
        return name
    return f"{name[: JOB_NAME_LENGTH - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _checked_partitioner(partitioner: Any) -> Any:
    """Refuse what is no partitioner when the DAG is read; wrap functions, which Airflow would call as templates."""
    if templated.is_template(partitioner) or _is_list(partitioner):
        return partitioner
    return as_partitioner(partitioner)


def _as_partitioner(partitioner: Any) -> Any:
    if isinstance(partitioner, str):
        raise ConfigurationError(
            f"expected the partitioner's template to render to a mapping or a list, got the text {partitioner[:60]!r}: "
            "give the DAG render_template_as_native_obj=True"
        )
    if _is_list(partitioner):
        return FunctionPartitioner(_Listed(partitioner))
    return as_partitioner(partitioner)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


class _Listed:
    """A ready list of contexts, which another task may have made."""

    __qualname__ = "partitioner"

    def __init__(self, contexts: Sequence[Any]) -> None:
        self._contexts = contexts

    def __call__(self) -> list[Any]:
        return list(self._contexts)
