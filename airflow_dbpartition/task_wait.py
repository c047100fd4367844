"""A task that waits for an execution, in its own process or deferred: what operator and sensor have in common."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowTaskTimeout, TaskDeferralTimeout

from airflow_dbpartition.aggregating import checked, resolved
from airflow_dbpartition.errors import DatabaseError, DbPartitionError
from airflow_dbpartition.hooks import opened
from airflow_dbpartition.lineage import NamesItsJob
from airflow_dbpartition.links import PartitionsLink, page_of
from airflow_dbpartition.ownership import owner_token
from airflow_dbpartition.reporting import remember, report
from airflow_dbpartition.repository_task import RepositoryTask
from airflow_dbpartition.task_outcome import Interruptible, airflow_errors

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_dbpartition.aggregating import Aggregator
    from airflow_dbpartition.connections import RepositoryAddress
    from airflow_dbpartition.repository import JobRepository
    from airflow_dbpartition.storable import JsonObject
    from airflow_dbpartition.waiting import Verdict

DEFERRAL_GRACE_S = 15.0  # the trigger itself sees a deadline; Airflow's own timeout is for a triggerer that hangs
LONGEST_PAUSE_S = 30.0


class TaskWait(Interruptible, NamesItsJob, RepositoryTask):
    """The waiting half of an operator. Success is only ever said after the counts in the database say so.

    A subclass says what a verdict means for its task (`_conclude`, `_give_up`), and how often to look.
    """

    no_nodes_timeout: Any
    on_sigterm: str
    aggregator: Aggregator | str | None = None
    operator_extra_links = (PartitionsLink(),)
    partitions_link: str | None = None

    # --- what a subclass decides -------------------------------------------------------------------------------

    def _conclude(self, context: Context, verdict: Verdict) -> Any:
        """Return the task's result, or raise, for a verdict that is final."""
        raise NotImplementedError

    def _give_up(self, context: Context, verdict: Verdict, why: str) -> NoReturn:
        """The time is over while the execution still runs."""
        raise NotImplementedError

    def _poll_interval_s(self) -> float:
        raise NotImplementedError

    def _token(self, context: Context) -> str | None:
        """Fences stop requests; None = this task is not to stop anything."""
        return owner_token(context["ti"])

    def _awaited(self, repository: JobRepository, context: Context) -> int:
        """The execution, found without anything that was handed from one process to the next."""
        raise NotImplementedError

    # --- Airflow's entry points --------------------------------------------------------------------------------

    def execute_complete(
        self,
        context: Context,
        event: JsonObject | None = None,
        *,
        job_execution_id: int | None = None,
        give_up_at: str | None = None,
    ) -> Any:
        """Resumed: whatever the event says, the database is asked again."""
        if event is not None:
            self.log.info("resumed: %s", event.get("message"))
        if job_execution_id is None:  # dag.test() hands over the event, and none of what the task deferred with
            job_execution_id = int((event or {})["job_execution_id"])
        self.partitions_link = page_of(job_execution_id, self._value("repository_conn_id"))
        deadline = None if give_up_at is None else datetime.fromisoformat(give_up_at)
        with airflow_errors():
            address = self._hook().address()
            try:
                with opened(address) as repository:
                    verdict = self._look(repository, address, job_execution_id)
            except DatabaseError as error:
                self.log.warning("%s; the wait goes on", error)
                self._defer(context, address, job_execution_id, deadline)
            return self._conclude_or_defer(context, address, verdict, deadline)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Airflow does not call `on_kill` when a deferral times out, so that case is handled here.

        The sensors' own version, which turns every failure into a skip when `soft_fail` is set, is passed over.
        """
        try:
            return BaseOperator.resume_execution(self, next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            with airflow_errors():
                address = self._hook().address()
                with opened(address) as repository:
                    verdict = self._look(repository, address, self._awaited(repository, context))
                if verdict.is_final:
                    return self._conclude(context, verdict)
                self._give_up(context, verdict, "the wait has timed out")

    # --- telling -----------------------------------------------------------------------------------------------

    def _show(self, context: Context, job_execution_id: int, **state: Any) -> None:
        """Make the execution known to Airflow from the first moment on: the link, and the task's stored state."""
        self.partitions_link = page_of(job_execution_id, self._value("repository_conn_id"))
        push = getattr(context["ti"], "xcom_push", None)
        if push is not None:  # Airflow itself pushes links only when a task ends or defers
            push(key=self.operator_extra_links[0].xcom_key, value=self.partitions_link)
        self._job_facts = {"job_execution_id": job_execution_id, **state}
        remember(context, {**self._job_facts, **self._for_the_next_try(context)})

    def _for_the_next_try(self, context: Context) -> JsonObject:  # noqa: ARG002
        """What is kept with the task beside the facts of its job."""
        return {}

    def _report(self, context: Context, verdict: Verdict) -> None:
        """Tell Airflow how the execution has ended, if it has."""
        execution = verdict.execution
        self._job_facts = {"job_execution_id": execution.job_execution_id, "job_name": execution.job_name}
        if verdict.summary is not None:
            self._job_facts = dict(verdict.summary)
            completed = verdict.outcome is verdict.outcome.COMPLETED
            report(context, verdict.summary, outlets=self.outlets if completed else ())

    def _result(self, verdict: Verdict) -> Any:
        """Of a completed job: what the aggregator makes of its results, or else the summary."""
        self.log.info("%s: %s", verdict.message, verdict.summary)
        if self.aggregator is None:
            return verdict.summary
        # An aggregator's error keeps hold of the results while Airflow handles it; their connection is not to stay.
        with closing(self._hook().iter_results(verdict.job_execution_id)) as results:
            return resolved(self.aggregator)(results)

    def _checked_aggregator(self, aggregator: Aggregator | str | None) -> Aggregator | str | None:
        with self._naming_itself():
            checked(aggregator)
        return aggregator

    # --- waiting -----------------------------------------------------------------------------------------------

    def _look(self, repository: JobRepository, address: RepositoryAddress, job_execution_id: int) -> Verdict:
        from airflow_dbpartition.waiting import look

        return look(
            repository,
            job_execution_id,
            no_nodes_timeout_s=self._no_nodes_timeout_s(address),
            timings=address.timings,
        )

    def _no_nodes_timeout_s(self, address: RepositoryAddress) -> float | None:
        limits = (self._value("no_nodes_timeout"), address.longest_no_nodes_timeout_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _wait(
        self,
        repository: JobRepository,
        address: RepositoryAddress,
        context: Context,
        job_execution_id: int,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """In this process, through outages of the database, until the end."""
        from airflow_dbpartition.recovery import Continuity
        from airflow_dbpartition.waiting import sweep

        continuity = Continuity(address.timings)
        began = time.monotonic()
        said, failures = "", 0
        try:
            while True:
                pause_s = self._pause_s(address)
                try:
                    sweep(repository, address.timings, continuity)
                    verdict = self._look(repository, address, job_execution_id)
                    failures = 0
                    if verdict.is_final:
                        return self._conclude(context, verdict)
                    job_execution_id = verdict.job_execution_id
                    if verdict.message != said:
                        said = verdict.message
                        self.log.info(said)
                    left_s = float("inf") if timeout_s is None else began + timeout_s - time.monotonic()
                    if left_s <= 0:
                        self._give_up(context, verdict, f"timed out after {timeout_s:g} s")
                    pause_s = min(pause_s, left_s)
                except DatabaseError as error:
                    failures += 1
                    pause_s = min(LONGEST_PAUSE_S, max(1.0, pause_s) * 2 ** min(failures, 10))
                    self.log.warning("%s; the wait goes on", error)
                self._pause(pause_s)
                self._heed_sigterm(context, job_execution_id)
        except AirflowTaskTimeout:
            self.log.error(self._stop(context, job_execution_id, "the task's execution_timeout has passed"))
            raise

    def _pause_s(self, address: RepositoryAddress) -> float:
        """Between two looks."""
        return min(self._poll_interval_s(), address.longest_poll_interval_s)

    def _conclude_or_defer(
        self, context: Context, address: RepositoryAddress, verdict: Verdict, give_up_at: datetime | None
    ) -> Any:
        if verdict.is_final:
            return self._conclude(context, verdict)
        self.log.info(verdict.message)
        if give_up_at is not None and datetime.now(timezone.utc) >= give_up_at:
            self._give_up(context, verdict, "the wait has timed out")
        return self._defer(context, address, verdict.job_execution_id, give_up_at)

    def _defer(
        self, context: Context, address: RepositoryAddress, job_execution_id: int, give_up_at: datetime | None
    ) -> NoReturn:
        from airflow_dbpartition.triggers import PartitionCompletionTrigger

        timeout = None
        if give_up_at is not None:
            timeout = max(give_up_at - datetime.now(timezone.utc), timedelta(seconds=1))
        self.defer(
            trigger=PartitionCompletionTrigger(
                job_execution_id=job_execution_id,
                repository_conn_id=self._value("repository_conn_id"),
                owner_token=self._token(context),
                poll_interval_s=self._pause_s(address),
                no_nodes_timeout_s=self._no_nodes_timeout_s(address),
            ),
            method_name="execute_complete",
            kwargs={
                "job_execution_id": job_execution_id,
                "give_up_at": None if give_up_at is None else give_up_at.isoformat(),
            },
            timeout=timeout,
        )

    # --- ending it ---------------------------------------------------------------------------------------------

    def _heed_sigterm(self, context: Context, job_execution_id: int, *, is_leaving: bool = False) -> None:
        """Raise if the process has been asked to end; not if it `is_leaving` by itself, and no person wants more."""
        if self._sigterm:
            self._interrupted(
                context["ti"],
                job_execution_id,
                on_sigterm=self._value("on_sigterm"),
                stop=lambda reason: self._stop(context, job_execution_id, reason),
                is_leaving=is_leaving,
            )

    def _stop(self, context: Context, job_execution_id: int, reason: str) -> str:
        """Stop the execution on a connection of its own, if this try owns it; never raises; says what happened."""
        token = self._token(context)
        if token is None:
            return f"job execution {job_execution_id} goes on: it belongs to another run"
        try:
            with opened(self._hook().address(), pool_size=0) as repository:
                latest = repository.reading.latest_of_instance(job_execution_id).job_execution_id
                status = repository.executions.stop(latest, owner_token=token, reason=reason)
                return f"job execution {latest} is {status}"
        except DbPartitionError as error:
            return f"job execution {job_execution_id} was not stopped: {error}"
