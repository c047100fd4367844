"""Operators that stop a job and that delete old history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_dbpartition import templated
from airflow_dbpartition.hooks import DEFAULT_CONN_ID
from airflow_dbpartition.lineage import NamesItsJob
from airflow_dbpartition.repository_task import JOB_READERS, JobTask, RepositoryTask
from airflow_dbpartition.task_outcome import airflow_errors

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_dbpartition.storable import JsonObject

_PURGE_READERS: dict[str, templated.Reader] = {
    "older_than": templated.duration_s,
    "repository_conn_id": templated.conn_id,
}

_STOP_READERS: dict[str, templated.Reader] = {
    **JOB_READERS,
    "reason": templated.text(1000),
    "repository_conn_id": templated.conn_id,
}


class PurgeJobRepositoryOperator(RepositoryTask):
    """Deletes finished jobs and removed nodes, never anything active; returns how many rows, by kind.

    In small transactions: it may be killed at any time, and run again.

    Args:
        older_than: since the end of the job's last execution (timedelta or seconds).
        repository_conn_id: the Airflow connection of the job repository. Its user needs the right to delete.
    """

    template_fields: Sequence[str] = (*_PURGE_READERS,)
    ui_color = "#eeeae2"
    _readers = _PURGE_READERS

    def __init__(
        self, *, older_than: timedelta | float | str, repository_conn_id: str = DEFAULT_CONN_ID, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.older_than = older_than
        self.repository_conn_id = repository_conn_id
        self._refuse_what_is_known()

    def execute(self, context: Context) -> JsonObject:  # noqa: ARG002 - Airflow's signature
        """Delete; returns the numbers of instances, executions, partitions and nodes."""
        with airflow_errors(), self._hook().repository() as repository:
            purged = vars(repository.retention.purge(older_than_s=self._value("older_than")))
        self.log.info("deleted %s", ", ".join(f"{count} {kind}" for kind, count in purged.items()))
        return dict(purged)


class StopJobExecutionOperator(NamesItsJob, JobTask):
    """Asks a job to stop, as a person would; returns the status that it then has.

    PENDING partitions are STOPPED at once, running ones when their workers hear of it. Whoever waits for the job fails
    without a retry. A job that has ended already, or was never launched, is left as it is.

    Args:
        job_execution_id: any execution of the job; its latest restart is what is stopped.
        job_name: instead of `job_execution_id`: the job's name.
        job_parameters: with `job_name`: what identifies the job beside its name.
        reason: what the execution says of its end.
        repository_conn_id: the Airflow connection of the job repository.
    """

    template_fields: Sequence[str] = (*_STOP_READERS,)
    ui_color = "#f7e3dc"
    _readers = _STOP_READERS

    def __init__(
        self,
        *,
        job_execution_id: Any = None,
        job_name: str | None = None,
        job_parameters: Mapping[str, Any] | None = None,
        reason: str = "stopped by task {{ ti.task_id }} of run {{ run_id }}",
        repository_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_execution_id = job_execution_id
        self.job_name = job_name
        self.job_parameters = job_parameters
        self.reason = reason
        self.repository_conn_id = repository_conn_id
        self._refuse_two_targets(job_execution_id, job_name)
        self._refuse_what_is_known()

    def execute(self, context: Context) -> str | None:  # noqa: ARG002 - Airflow's signature
        """Ask; returns the status, or None where the job was never launched."""
        with airflow_errors(), self._hook().repository() as repository:
            target = self._target(repository)
            if target is None:
                self.log.info("job %r has never been launched: there is nothing to stop", self.job_name)
                return None
            status = repository.executions.stop(target.job_execution_id, reason=self._value("reason"))
        self._job_facts = {
            "job_execution_id": target.job_execution_id,
            "job_name": target.job_name,
            "status": status.value,
        }
        self.log.info("job execution %d is %s", target.job_execution_id, status)
        return status.value
