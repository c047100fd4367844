"""A worker that has nothing to do says nothing to the database but its heartbeat, and still finds new work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from airflow_dbpartition.config import WorkerConfig
from airflow_dbpartition.worker import attention
from airflow_dbpartition.worker.node import Worker
from tests.worker.processes import CALM, STEPS, Fleet, wait_until

HEARTBEATS = "dbpartition heartbeat"
CLAIMS = "dbpartition worker"


@pytest.fixture
def said() -> Iterator[Counter[str]]:
    """How many messages each kind of connection of this process has sent to PostgreSQL so far."""
    counts: Counter[str] = Counter()

    def count(connection: Any, *_: object) -> None:
        counts[connection.connection.driver_connection.info.dsn_parameters["application_name"]] += 1

    event.listen(Engine, "before_cursor_execute", count)
    yield counts
    event.remove(Engine, "before_cursor_execute", count)


@contextmanager
def running(fleet: Fleet, *, listen: bool) -> Iterator[Worker]:
    config = WorkerConfig(imports=(str(STEPS),), executor="thread", listen=listen, timings=CALM)
    worker = Worker(fleet.database.config(), config)
    thread = threading.Thread(target=worker.run, name="worker")
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(30)


@pytest.mark.parametrize("listen", [True, False], ids=["told", "untold"])
def test_only_heartbeats_are_sent_while_no_work_is_active(
    postgres_fleet: Fleet, said: Counter[str], monkeypatch: pytest.MonkeyPatch, listen: bool
) -> None:
    monkeypatch.setattr(attention, "UNTOLD_S", 0.0)
    with running(postgres_fleet, listen=listen):
        assert postgres_fleet.submit().ends() == "COMPLETED"
        before = said.copy()

        def is_quiet() -> bool:
            nonlocal before
            if said[CLAIMS] != before[CLAIMS]:
                before = said.copy()
            return said[HEARTBEATS] >= before[HEARTBEATS] + 5

        wait_until(is_quiet, "5 heartbeats without anything else")
        assert postgres_fleet.submit().ends() == "COMPLETED"
