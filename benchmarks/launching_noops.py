"""Launch a job of no-op partitions as the operator does."""

from __future__ import annotations

from collections.abc import Iterator

from contexts import context
from fleet import Fleet

from airflow_dbpartition.domain import JobIdentity, Partition
from airflow_dbpartition.launching import Job, Launcher


def noops(count: int, context_bytes: int = 0) -> Iterator[Partition]:
    """Make one partition at a time; nobody holds them all."""
    for number in range(count):
        yield Partition(f"p{number}", context(number, context_bytes))


def launch_noops(fleet: Fleet, name: str, count: int) -> int:
    """Plan a job for the nodes that are live now, and return its execution's id."""
    job = Job(identity=JobIdentity(name, {}), step_name="noop", partitioner=lambda: noops(count))
    return Launcher(fleet.repository).launch(job).job_execution_id
