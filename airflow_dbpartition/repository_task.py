"""What our tasks have in common: a connection, arguments that may be templates, and how a job is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.configuration import conf

from airflow_dbpartition import templated
from airflow_dbpartition.domain import JOB_NAME_LENGTH, JobIdentity
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.hooks import JobRepositoryHook

if TYPE_CHECKING:
    from airflow_dbpartition.domain import JobExecution
    from airflow_dbpartition.repository import JobRepository

SHORTEST_PAUSE_S = 0.2  # between two looks of a sensor, whatever its poke_interval

Readers = Mapping[str, templated.Reader]

JOB_READERS: Readers = {
    "job_execution_id": templated.optional(templated.integer(1)),
    "job_name": templated.optional(templated.text(JOB_NAME_LENGTH)),
    "job_parameters": templated.optional(templated.json_object),
}


class RepositoryTask(BaseOperator):
    """A subclass names its arguments and how each is read in `_readers`, and calls `_refuse_what_is_known` at the end
    of its own `__init__`.
    """

    _readers: ClassVar[Readers]
    repository_conn_id: str

    def __init__(self, **kwargs: Any) -> None:  # Airflow's metaclass would put BaseOperator's here, and skip a sensor's
        super().__init__(**kwargs)

    def _hook(self) -> JobRepositoryHook:
        return JobRepositoryHook(self._value("repository_conn_id"))

    def _value(self, name: str) -> Any:
        """An argument, as its reader understands it now that templates have been rendered."""
        return self._read(name, getattr(self, name))

    def _read(self, name: str, value: Any) -> Any:
        with self._naming_itself():
            return self._readers[name](name, value)

    def _is_deferrable(self, value: bool | None) -> bool:
        """What the author says, or Airflow's configuration where the author says nothing."""
        if value is None:
            return bool(conf.getboolean("operators", "default_deferrable", fallback=False))
        with self._naming_itself():
            return templated.flag("deferrable", value)

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Put the task's name before the words of a wrong argument."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(f"task {self.task_id!r}: {error}") from None

    def _refuse_what_is_known(self) -> None:
        """Refuse wrong arguments when the DAG is read, as far as they are no templates."""
        for name in self._readers:
            value = getattr(self, name)
            if not templated.is_template(value):
                self._read(name, value)


class JobTask(RepositoryTask):
    """A task about a job that somebody launches, named by its execution's id or by its name (`JOB_READERS`)."""

    job_execution_id: Any
    job_name: str | None
    job_parameters: Mapping[str, Any] | None

    def _refuse_two_targets(self, job_execution_id: Any, job_name: Any) -> None:
        """A job is named by its execution's id or by its name; which of two templates comes out as None is seen later.

        Raises:
            ConfigurationError: neither is given, or both.
        """
        given = [value for value in (job_execution_id, job_name) if value is not None]
        if not given or (len(given) > 1 and not any(map(templated.is_template, given))):
            raise ConfigurationError(
                f"task {self.task_id!r}: expected job_execution_id, or job_name with job_parameters where the job has "
                f"any, got job_execution_id={job_execution_id!r}, job_name={job_name!r}"
            )

    def _target(self, repository: JobRepository) -> JobExecution | None:
        """The latest execution of the job; None: a job that has not been launched yet."""
        job_execution_id, name = self._value("job_execution_id"), self._value("job_name")
        self._refuse_two_targets(job_execution_id, name)
        if name is None:
            return repository.reading.latest_of_instance(job_execution_id)
        identity = self._named_identity()
        return repository.reading.latest(identity.job_name, identity.job_key)

    def _named_identity(self) -> JobIdentity:
        return JobIdentity(self._value("job_name"), self._value("job_parameters") or {})
