"""One plan, written in one of several ways, by a process that does nothing else: seconds and memory, as JSON.

python benchmarks/planning_ways.py (ours|copy|sqlalchemy) URL COUNT BYTES
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

import psycopg2
from contexts import context
from launching_noops import noops
from peak_memory import peak_mib
from servers import libpq_url
from sqlalchemy import create_engine, insert

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.domain import JobIdentity
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.repository import JobRepository, NewExecution
from airflow_dbpartition.schema import build_tables

BATCH = 2000
NODES = ("w0", "w1")
NOW = "2026-01-01T00:00:00+00:00"  # a constant: the bare ways ask no clock


class Lines(io.TextIOBase):
    """Text that is made while it is read."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    def read(self, _size: int | None = -1) -> str:
        return "".join(itertools.islice(self._lines, 100))


def ours(url: str, count: int, size_bytes: int) -> Callable[[], object]:
    """What the operator does, for nodes that are alive (or say so)."""
    repository = JobRepository.connect(DatabaseConfig(url=url))
    for node_id in NODES:
        repository.nodes.register(
            node_id=node_id, node_group="default", host="nowhere", pid=0, version="0", capacity=1, steps=("noop",)
        )
    launcher = Launcher(repository)
    job = Job(identity=JobIdentity("plan", {}), step_name="noop", partitioner=lambda: noops(count, size_bytes))
    return lambda: launcher.launch(job)


def copy(url: str, count: int, size_bytes: int) -> Callable[[], object]:
    """Nothing but COPY of the same rows."""
    job, connection = _parent(url), psycopg2.connect(libpq_url(url))
    names = ", ".join(_row(job, 0, size_bytes))

    def line(number: int) -> str:
        row = _row(job, number, size_bytes)
        row["execution_context"] = json.dumps(row["execution_context"])
        return "\t".join(map(str, row.values())) + "\n"

    def write() -> None:
        with connection, connection.cursor() as cursor:
            cursor.copy_expert(
                f"COPY batch_partitions ({names}) FROM STDIN", cast(TextIO, Lines(map(line, range(count))))
            )

    return write


def sqlalchemy(url: str, count: int, size_bytes: int) -> Callable[[], object]:
    """SQLAlchemy's own bulk insert, in one transaction."""
    job, engine, table = _parent(url), create_engine(url), build_tables().partitions

    def batches() -> Iterator[list[dict[str, Any]]]:
        for first in range(0, count, BATCH):
            yield [_row(job, number, size_bytes) for number in range(first, min(first + BATCH, count))]

    def write() -> None:
        with engine.begin() as connection:
            for batch in batches():
                connection.execute(insert(table), batch)

    engine.connect().close()
    return write


WAYS = {way.__name__: way for way in (ours, copy, sqlalchemy)}


def _parent(url: str) -> int:
    """The execution that the rows belong to."""
    repository = JobRepository.connect(DatabaseConfig(url=url))
    new = NewExecution(identity=JobIdentity("parent", {}), step_name="noop")
    job_execution_id = repository.executions.submit(new, [], {}).job_execution_id
    repository.close()
    return job_execution_id


def _row(job_execution_id: int, number: int, size_bytes: int) -> dict[str, Any]:
    return {
        "job_execution_id": job_execution_id,
        "job_instance_id": job_execution_id,
        "partition_key": f"p{number}",
        "step_name": "noop",
        "node_group": "default",
        "assigned_node": NODES[number % len(NODES)],
        "status": "PENDING",
        "is_transferable": 1,
        "transfer_policy": "until_started",
        "version": 0,
        "priority": 0,
        "weight": 1.0,
        "attempt": 0,
        "node_losses": 0,
        "execution_context": context(number, size_bytes),
        "available_at": NOW,
        "create_time": NOW,
        "last_updated": NOW,
    }


def run() -> None:
    way, url, *numbers = sys.argv[1:]
    write = WAYS[way](url, *map(int, numbers))
    before_mib = peak_mib()
    begin = time.perf_counter()
    write()
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "grown_mib": peak_mib() - before_mib}))


if __name__ == "__main__":
    run()
