"""What the tests without Airflow's processes begin with: connections to real databases, and task instances."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from airflow.sdk import Connection
from sqlalchemy.engine import make_url

from tests.databases import Database


def connection_to(database: Database, **extra: Any) -> Connection:
    """An Airflow connection to a test's own database."""
    url = make_url(database.url)
    if database.name == "sqlite":
        return Connection(conn_id="repo", conn_type="sqlite", host=url.database, extra=json.dumps(extra))
    if database.schema is not None:
        extra = {"dbpartition_schema": database.schema, **extra}
    return Connection(
        conn_id="repo",
        conn_type=url.get_backend_name(),
        host=url.host,
        port=url.port,
        login=url.username,
        password=url.password,
        schema=url.database,
        extra=json.dumps(extra),
    )


def define(monkeypatch: pytest.MonkeyPatch, conn_id: str, connection: Connection) -> None:
    """Let Airflow find the connection under this name."""
    names = ("conn_type", "host", "port", "login", "password", "schema")
    fields: dict[str, Any] = {name: getattr(connection, name) for name in names}
    fields["extra"] = connection.extra_dejson
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))


@dataclass
class Try:
    """A running task instance, as far as our operators look at it.

    A retry and a clear make another one: see `retried` and `cleared`.
    """

    dag_id: str = "dag"
    run_id: str = "run"
    task_id: str = "task"
    map_index: int | None = -1
    try_number: int = 1
    max_tries: int = 0
    id: Any = field(default_factory=uuid4)
    first_reschedule: Any = None

    def retried(self) -> Try:
        """What Airflow makes of a failed try that has retries left."""
        return self._next(self.max_tries)

    def cleared(self, *, retries: int = 0) -> Try:
        """What Airflow makes of a try that a person clears."""
        return self._next(self.try_number + retries)

    def of(self, task_id: str, **changes: Any) -> Try:
        """The first try of another task of the same run."""
        return Try(self.dag_id, self.run_id, task_id, **changes)

    def context(self) -> Any:
        return {"ti": self, "dag_run": self, "run_id": self.run_id}

    def get_first_reschedule_date(self, context: Any) -> Any:
        return self.first_reschedule

    def _next(self, max_tries: int) -> Try:
        return Try(self.dag_id, self.run_id, self.task_id, self.map_index, self.try_number + 1, max_tries)
