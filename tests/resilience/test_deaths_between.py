"""A process dies between two transactions of one verb: the next sweep does the rest."""

from __future__ import annotations

from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.repository import JobRepository
from tests import scenarios


def test_a_failure_stops_its_fail_fast_execution_though_the_node_died_before_it_could(
    repository: JobRepository,
) -> None:
    scenarios.add_node(repository)
    settings = JobSettings(fail_fast=True)
    job = scenarios.submit(repository, 3, settings=settings).job_execution_id
    broken, running = scenarios.claim(repository, limit=2)
    repository.settlements.fail(broken, message="broken")  # and no more: the node is dead

    scenarios.sweep(repository)
    assert repository.reading.execution(job).status == "STOPPING"
    assert scenarios.statuses(repository, job) == {"FAILED": 1, "CLAIMED": 1, "STOPPED": 1}
    repository.settlements.stop(running)
    assert scenarios.sweep(repository).finalised == {job: "FAILED"}


def test_a_failure_of_an_execution_that_does_not_fail_fast_stops_nothing(repository: JobRepository) -> None:
    scenarios.add_node(repository)
    job = scenarios.submit(repository, 2).job_execution_id
    repository.settlements.fail(scenarios.claim_one(repository), message="broken")

    scenarios.sweep(repository)
    assert repository.reading.execution(job).status == "STARTING"
    assert scenarios.statuses(repository, job) == {"FAILED": 1, "PENDING": 1}


def test_the_last_completion_ends_its_execution_though_the_node_died_before_it_could(repository: JobRepository) -> None:
    scenarios.add_node(repository)
    job = scenarios.submit(repository).job_execution_id
    scenarios.complete(repository, scenarios.claim_one(repository))

    assert scenarios.sweep(repository).finalised == {job: "COMPLETED"}
