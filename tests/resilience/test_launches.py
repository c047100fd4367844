"""Many launch the same job at once, and poison meets its limit while the fleet lives."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.repository import JobRepository
from tests import scenarios
from tests.databases import Database
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.worker.processes import Fleet

PROCESSES = 20


def _submit(arguments: tuple[str, Any]) -> int:
    url, barrier = arguments
    repository = JobRepository.connect(Database("postgresql", url).config(pool_size=1))
    repository.nodes.all()  # connected before the start
    barrier.wait(timeout=60)
    try:
        return scenarios.submit(repository, 10).job_execution_id
    finally:
        repository.close()


def test_twenty_processes_that_submit_the_same_instance_get_one_execution(
    own_database: Database, own_repository: JobRepository
) -> None:
    spawn = multiprocessing.get_context("fork")
    with spawn.Manager() as manager, spawn.Pool(PROCESSES) as pool:
        barrier = manager.Barrier(PROCESSES)
        got = pool.map(_submit, [(own_database.url, barrier)] * PROCESSES, chunksize=1)
    assert len(set(got)) == 1
    assert scenarios.statuses(own_repository, got[0]) == {"PENDING": 10}
    assert len(own_repository.reading.recent()) == 1


@pytest.mark.resilience_long
def test_a_partition_that_kills_its_nodes_stops_at_max_node_losses_and_the_fleet_lives(
    own_fleet: Fleet, ledgers: Ledgers
) -> None:
    for number in range(3):
        own_fleet.start(f"n{number}", imports=STEPS, wait=False)
    for node in own_fleet.nodes:
        node.wait_until_live()
    settings = JobSettings(max_node_losses=2)
    poison = own_fleet.submit(ledgers.plan(1, transferable=True, kills="node"), settings=settings, step=STEP)
    assert poison.ends(timeout_s=40) == "FAILED"
    assert "2 lost nodes" in (poison.partition().exit_message or "")
    assert poison.events().count("lost") == 2

    after = own_fleet.submit(ledgers.plan(5, transferable=False), step=STEP)
    assert after.ends() == "COMPLETED"
    assert len(own_fleet.repository.nodes.all()) == 1
    assert ledgers.verdict([poison.id, after.id]).faults == []


def test_a_fleet_at_zero_finds_its_work_when_it_is_scaled_up(own_fleet: Fleet, ledgers: Ledgers) -> None:
    job = own_fleet.submit(ledgers.plan(20, transferable=False), step=STEP)
    for number in range(2):
        own_fleet.start(f"n{number}", imports=STEPS, wait=False)
    assert job.ends(timeout_s=30) == "COMPLETED"
    assert ledgers.verdict([job.id]).faults == []
