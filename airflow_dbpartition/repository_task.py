"""RepositoryTask: what every task of ours has in common: a connection, and arguments that may be templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_dbpartition import templated
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.hooks import JobRepositoryHook

Readers = Mapping[str, templated.Reader]


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
