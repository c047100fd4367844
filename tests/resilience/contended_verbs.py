"""The repository's verbs, each with a story of its own, and where it writes last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.repository import JobRepository
from tests import scenarios
from tests.resilience import test_broken_connections as stories
from tests.resilience.test_broken_connections import Story

Verb = Callable[[JobRepository], Story]


def claim(repository: JobRepository) -> Story:
    scenarios.add_node(repository)
    job = scenarios.submit(repository, 3).job_execution_id
    taken: list[Any] = []
    yield b"", lambda through: taken.extend(scenarios.claim(through, limit=2))
    assert [(one.partition_key, one.attempt, one.version) for one in taken] == [("p0", 1, 1), ("p1", 1, 1)]
    assert scenarios.column(repository, job, "version") == [1, 1, 0]


def sweep(repository: JobRepository) -> Story:
    settings = JobSettings(transferable="always")
    scenarios.add_node(repository)
    job = scenarios.submit(repository, settings=settings).job_execution_id
    scenarios.claim(repository)
    scenarios.silence(repository, "a", 100)
    scenarios.add_node(repository, "b")
    yield b"", scenarios.sweep
    row = scenarios.partition(repository, job)
    assert (row.status, row.node_losses, row.version, row.assigned_node) == ("PENDING", 1, 2, "b")
    assert scenarios.event_names(repository, job) == ["lost", "reassigned"]


def purge(repository: JobRepository) -> Story:
    scenarios.add_node(repository)
    old = scenarios.submit(repository, 2, job="old").job_execution_id
    scenarios.fail_all(repository, old)
    young = scenarios.submit(repository, job="young").job_execution_id
    yield b"", lambda through: through.retention.purge(older_than_s=-1)
    assert [execution.job_execution_id for execution in repository.reading.recent()] == [young]


# Where each verb writes last: what it has written before has to be taken back.
LAST_TABLE: dict[Verb, str] = {
    stories.plan: "batch_partitions",
    stories.restart: "batch_partitions",
    stories.heartbeat: "batch_nodes",
    stories.register: "batch_nodes",
    claim: "batch_partitions",
    stories.complete: "batch_partitions",
    stories.complete_all: "batch_partitions",
    stories.fail: "batch_partition_events",
    stories.retry: "batch_partition_events",
    stories.release: "batch_partition_events",
    stories.stop: "batch_job_executions",
    stories.reassign: "batch_partition_events",
    stories.finalise: "batch_job_executions",
    sweep: "batch_nodes",
    purge: "batch_job_instances",
}
MAIN_VERBS = (stories.plan, claim, stories.complete, stories.heartbeat, stories.finalise)


def on(*names: str, verbs: Collection[Verb] = MAIN_VERBS, short: Collection[str]) -> pytest.MarkDecorator:
    """Run the test for each of the verbs on each of these databases: in the long half only, where it is not short."""
    cases = [
        pytest.param(name, verb, id=case, marks=() if case in short else pytest.mark.resilience_long)
        for verb in verbs
        for name in names
        for case in [f"{verb.__name__}-{name}"]
    ]
    return pytest.mark.parametrize(("fresh_database", "verb"), cases, indirect=["fresh_database"])
