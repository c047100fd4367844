"""PartitionCompletionSensor: waits for the end of a job execution, by poking, by rescheduling, or deferred."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
)

from airflow_dbpartition import templated
from airflow_dbpartition.errors import DatabaseError, JobExecutionNotFoundError, OwnershipLostError
from airflow_dbpartition.hooks import DEFAULT_CONN_ID, opened
from airflow_dbpartition.live_nodes import LiveNodesSensor
from airflow_dbpartition.ownership import describe, owner_token, same_run, was_cleared
from airflow_dbpartition.reporting import recalled
from airflow_dbpartition.repository_task import JOB_READERS, SHORTEST_PAUSE_S, JobTask
from airflow_dbpartition.task_outcome import airflow_errors
from airflow_dbpartition.task_wait import TaskWait

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_dbpartition.aggregating import Aggregator
    from airflow_dbpartition.connections import RepositoryAddress
    from airflow_dbpartition.domain import JobExecution
    from airflow_dbpartition.repository import JobRepository
    from airflow_dbpartition.storable import JsonObject
    from airflow_dbpartition.waiting import Verdict

__all__ = ["LiveNodesSensor", "PartitionCompletionSensor"]

# Airflow fails a task that is queued again before its scheduler has heard how the last look ended.
LEAST_RESCHEDULE_S = 5.0

_READERS: dict[str, templated.Reader] = {
    **JOB_READERS,
    "restart_failed": templated.flag,
    "no_nodes_timeout": templated.optional(templated.duration_s),
    "on_sigterm": templated.one_of("detach", "stop"),
    "repository_conn_id": templated.conn_id,
}


class PartitionCompletionSensor(TaskWait, JobTask, BaseSensorOperator):
    """Succeeds when every partition has COMPLETED; its return value is the summary (counts, summed counters).

    It follows restarts: the latest execution of the same instance is what counts. `mode="poke"`, `mode="reschedule"`
    and `deferrable=True` come to the same verdict.

    A sensor of the DAG run that launched the execution owns it: to mark the sensor failed, to clear it, or its timeout
    stops the execution; and when it is retried or cleared after a failure, it restarts what failed. A sensor elsewhere
    only watches.

    `soft_fail` skips on timeouts, never on failed partitions.

    Args:
        job_execution_id: what `PartitionedStepOperator` returned.
        job_name: instead of `job_execution_id`: the name of a job that anybody launches, another DAG for instance. It
            need not be launched yet: the sensor waits for that, too.
        job_parameters: with `job_name`: what identifies the job beside its name.
        repository_conn_id: the Airflow connection of the job repository.
        aggregator: a function of the results (an iterator of partition key and result, read page by page), or
            "package.module:function"; what it returns is the task's return value.
        restart_failed: a retried or cleared sensor restarts a failed or stopped execution, once per try.
        deferrable: wait in the triggerer; by default as Airflow's `[operators] default_deferrable` says.
        no_nodes_timeout: fail when there was no live node for so long with work pending (timedelta or seconds); the
            partitions stay. None = never.
        on_sigterm: when the sensor's own process is drained: "detach" leaves the execution running, and the retry goes
            on waiting; "stop" stops it. A person's kill always stops it.
        poke_interval: seconds between two looks, in every mode; 5 by default, and never less than that in "reschedule".
        timeout: seconds, as in every Airflow sensor; the launch's own deadline ends the wait as well.
        kwargs: everything else a sensor takes (mode, soft_fail, retries …).
    """

    template_fields: Sequence[str] = (*_READERS,)
    ui_color = "#e6f1f2"
    _readers = _READERS

    def __init__(
        self,
        *,
        job_execution_id: Any = None,
        job_name: str | None = None,
        job_parameters: Mapping[str, Any] | None = None,
        aggregator: Aggregator | str | None = None,
        repository_conn_id: str = DEFAULT_CONN_ID,
        restart_failed: bool | str = True,
        deferrable: bool | None = None,
        no_nodes_timeout: timedelta | float | str | None = 1800.0,
        on_sigterm: str = "detach",
        poke_interval: timedelta | float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.job_execution_id = job_execution_id
        self.job_name = job_name
        self.job_parameters = job_parameters
        self.aggregator = self._checked_aggregator(aggregator)
        self._refuse_two_targets(job_execution_id, job_name)
        self.repository_conn_id = repository_conn_id
        self.restart_failed = restart_failed
        self.deferrable = self._is_deferrable(deferrable)
        self.no_nodes_timeout = no_nodes_timeout
        self.on_sigterm = on_sigterm
        self._owns = False
        self._refuse_what_is_known()

    # --- Airflow's entry points --------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        """Wait for the end; returns the summary."""
        if self.reschedule and not self.deferrable:
            return self._poke_or_reschedule(context)
        with airflow_errors():
            address = self._hook().address()
            if self.deferrable:
                return self._defer_or_conclude(context, address, datetime.now(timezone.utc) + self._patience)
            with opened(address) as repository:
                job_execution_id, left_s = self._begin_once_launched(repository, address, context)
                return self._wait(repository, address, context, job_execution_id, timeout_s=left_s)

    def execute_launched(self, context: Context, event: JsonObject | None = None, *, give_up_at: str = "") -> Any:
        """Resumed: the job that was waited for by name has been launched."""
        if event is not None:
            self.log.info("resumed: %s", event.get("message"))
        with airflow_errors():
            # dag.test() hands over the event, and none of what the task deferred with.
            until = datetime.fromisoformat(give_up_at) if give_up_at else datetime.now(timezone.utc) + self._patience
            return self._defer_or_conclude(context, self._hook().address(), until)

    def _defer_or_conclude(self, context: Context, address: RepositoryAddress, give_up_at: datetime) -> Any:
        with opened(address) as repository:
            job_execution_id = self._begin(repository, address, context)
            if job_execution_id is None:
                self._defer_until_launched(address, give_up_at)
            self._heed_sigterm(context, job_execution_id, is_leaving=True)
            verdict = self._look(repository, address, job_execution_id)
        return self._conclude_or_defer(context, address, verdict, give_up_at)

    def poke(self, context: Context) -> PokeReturnValue:
        """One look.

        Raises:
            AirflowException: the execution has ended otherwise than well.
        """
        from airflow_dbpartition.waiting import sweep

        with airflow_errors():
            address = self._hook().address()
            with opened(address) as repository:
                job_execution_id = self._begin(repository, address, context)
                if job_execution_id is None:
                    self.log.info("%s has not been launched yet", self._described())
                    return PokeReturnValue(is_done=False)
                sweep(repository, address.timings)
                verdict = self._look(repository, address, job_execution_id)
            if verdict.is_final:
                return PokeReturnValue(is_done=True, xcom_value=self._conclude(context, verdict))
            self.log.info(verdict.message)
            self._heed_sigterm(context, verdict.job_execution_id, is_leaving=True)
            return PokeReturnValue(is_done=False)

    def _poke_or_reschedule(self, context: Context) -> Any:
        """As the base class does it, but an outage of the database is waited out, and a timeout stops the work."""
        ti: Any = context["ti"]
        first = ti.get_first_reschedule_date(context)
        began = first or datetime.now(timezone.utc)

        def elapsed_s() -> float:
            return float((datetime.now(timezone.utc) - began).total_seconds())

        try:
            looked = self.poke(context)
            if looked.is_done:
                return looked.xcom_value
        except AirflowException as error:
            if first is None or not isinstance(error.__context__, DatabaseError):
                raise
            self.log.warning("%s; the wait goes on", error)
        if elapsed_s() > self.timeout:
            with airflow_errors():
                address = self._hook().address()
                with opened(address) as repository:
                    verdict = self._look(repository, address, self._awaited(repository, context))
                if verdict.is_final:
                    return self._conclude(context, verdict)
                self._give_up(context, verdict, f"timed out after {self.timeout:g} s")
        pause_s = max(LEAST_RESCHEDULE_S, self._get_next_poke_interval(began, elapsed_s, 1))
        raise AirflowRescheduleException(  # type: ignore[no-untyped-call]
            datetime.now(timezone.utc) + timedelta(seconds=pause_s)
        )

    # --- waiting -----------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def _described(self) -> str:
        identity = self._named_identity()
        return f"job {identity.job_name!r} with the parameters {dict(identity.parameters)!r}"

    def _begin(self, repository: JobRepository, address: RepositoryAddress, context: Context) -> int | None:
        """Take over what this run has launched, and restart it where this try is a person's or Airflow's retry."""
        ti: Any = context["ti"]
        execution = self._target(repository)
        if execution is None:
            return None
        self._owns = same_run(execution.manager, ti)
        job_execution_id = execution.job_execution_id
        if ti.try_number > 1:
            self._leave_another(repository, context, execution)
        if self._owns and self._is_to_restart(execution, ti):
            job_execution_id = self._restart(repository, address, execution, ti)
        elif self._owns and execution.status.is_active:
            status = repository.executions.attach(job_execution_id, owner_token=owner_token(ti))
            if self._is_to_restart(replace(execution, status=status), ti):  # the old try's stop was faster
                job_execution_id = self._restart(repository, address, execution, ti)
        self._show(context, job_execution_id, job_name=execution.job_name)
        return job_execution_id

    def _begin_once_launched(
        self, repository: JobRepository, address: RepositoryAddress, context: Context
    ) -> tuple[int, float]:
        """Wait in this process until there is a job of that name; returns its execution, and the seconds left."""
        began, said = time.monotonic(), ""
        while True:
            left_s = began + self.timeout - time.monotonic()
            try:
                job_execution_id = self._begin(repository, address, context)
                if job_execution_id is not None:
                    return job_execution_id, max(left_s, 0.0)
                news = f"{self._described()} has not been launched yet"
            except DatabaseError as error:
                if not said:  # the first look: a wrong connection is to be heard of at once
                    raise
                news = f"{error}; the wait goes on"
            if news != said:
                self.log.info(news)
                said = news
            if left_s <= 0:
                self._never_launched()
            self._pause(min(self._poll_interval_s(), left_s))
            self._heed_sigterm_before_launch()

    def _defer_until_launched(self, address: RepositoryAddress, give_up_at: datetime) -> NoReturn:
        from airflow_dbpartition.triggers import JobLaunchTrigger

        left = give_up_at - datetime.now(timezone.utc)
        if left <= timedelta():
            self._never_launched()
        self.log.info("%s has not been launched yet", self._described())
        identity = self._named_identity()
        self.defer(
            trigger=JobLaunchTrigger(
                job_name=identity.job_name,
                job_key=identity.job_key,
                repository_conn_id=self._value("repository_conn_id"),
                poll_interval_s=self._pause_s(address),
            ),
            method_name="execute_launched",
            kwargs={"give_up_at": give_up_at.isoformat()},
            timeout=left,
        )

    def _never_launched(self) -> NoReturn:
        self._time_is_up(f"timed out after {self.timeout:g} s: {self._described()} was never launched")

    def _leave_another(self, repository: JobRepository, context: Context, execution: JobExecution) -> None:
        """Stop what an earlier try has waited for if it is another job now, and nobody else has taken it over.

        Such is a mapped sensor whose index has another input after a clear. Airflow does not tell the earlier try where
        the sensor was to be rescheduled, and tells its trigger too late where this try has deferred meanwhile.
        """
        before = recalled(context)
        job_execution_id, token = before.get("job_execution_id"), before.get("owner_token")
        if not isinstance(job_execution_id, int) or not isinstance(token, str):
            return
        try:
            left = repository.reading.latest_of_instance(job_execution_id)
            if left.job_instance_id == execution.job_instance_id or not left.status.is_active:
                return
            reason = f"its sensor waits for job execution {execution.job_execution_id} now"
            status = repository.executions.stop(left.job_execution_id, owner_token=token, reason=reason)
            self.log.info("job execution %d is %s: %s", left.job_execution_id, status, reason)
        except (JobExecutionNotFoundError, OwnershipLostError) as error:
            self.log.info("%s", error)

    def _for_the_next_try(self, context: Context) -> JsonObject:
        token = self._token(context)
        return {} if token is None else {"owner_token": token}

    def _is_to_restart(self, execution: JobExecution, ti: Any) -> bool:
        """A later try of this sensor, which has not restarted or awaited this very execution yet."""
        from airflow_dbpartition.domain import ExecutionStatus

        return (
            ti.try_number > 1
            and execution.owner_token != owner_token(ti)
            and execution.status in (ExecutionStatus.FAILED, ExecutionStatus.STOPPED, ExecutionStatus.STOPPING)
            and self._value("restart_failed")
        )

    def _restart(self, repository: JobRepository, address: RepositoryAddress, execution: JobExecution, ti: Any) -> int:
        from airflow_dbpartition.launching import Launcher

        retries = self.retries or 0
        cleared = was_cleared(execution.manager, ti, retries=retries)
        timeout_s = execution.manager.get("timeout_s")
        launched = Launcher(repository, timings=address.timings, log=self.log.info).restart_unless_completed(
            execution.job_execution_id,
            owner_token=owner_token(ti),
            manager={**describe(ti, retries=retries), "timeout_s": timeout_s},
            include_lost=cleared,
            timeout_s=timeout_s,
            keep_deadline=not cleared and timeout_s is not None,
        )
        return launched.job_execution_id

    def _poll_interval_s(self) -> float:
        return max(SHORTEST_PAUSE_S, float(self.poke_interval))

    def _token(self, context: Context) -> str | None:
        return super()._token(context) if self._owns else None

    def _awaited(self, repository: JobRepository, context: Context) -> int:
        execution = self._target(repository)
        if execution is None:
            self._never_launched()
        self._owns = same_run(execution.manager, context["ti"])
        return execution.job_execution_id

    def _conclude(self, context: Context, verdict: Verdict) -> Any:
        from airflow_dbpartition.waiting import Outcome

        self._owns = same_run(verdict.execution.manager, context["ti"])
        self._report(context, verdict)
        if verdict.outcome is Outcome.COMPLETED:
            return self._result(verdict)
        if verdict.outcome is Outcome.LATE:
            self._give_up(context, verdict, "its deadline has passed")
        if self.never_fail:
            raise AirflowSkipException(f"skipped, since never_fail is set: {verdict.message}")
        if verdict.outcome in (Outcome.STOPPED, Outcome.ABANDONED):  # a person's word; a retry must not undo it
            raise AirflowFailException(verdict.message)
        raise AirflowException(verdict.message)

    def _give_up(self, context: Context, verdict: Verdict, why: str) -> NoReturn:
        stopped = self._stop(context, verdict.job_execution_id, why)
        self._time_is_up(f"{why}: {verdict.message}; {stopped}")

    def _time_is_up(self, message: str) -> NoReturn:
        if self.soft_fail or self.never_fail:
            raise AirflowSkipException(f"skipped, since soft_fail is set: {message}")
        raise AirflowSensorTimeout(message)
