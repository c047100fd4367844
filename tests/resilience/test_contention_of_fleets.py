"""A fleet whose database server is sabotaged while it works: all is done once, and nobody is taken for dead."""

from __future__ import annotations

import random
import re
import time

import pytest

from airflow_dbpartition.config import Timings
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.domain import JobSettings, NodeStatus, PartitionStatus, TransferPolicy
from airflow_dbpartition.failure_texts import headline
from tests.resilience.chaos import let_time_pass, new_seed
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.resilience.saboteur import Saboteur
from tests.worker.processes import Fleet

TIMINGS = Timings(
    heartbeat_s=0.4, unreachable_after_s=3.0, remove_after_s=9.0, sweep_s=0.3, poll_s=0.3, steal_after_s=0.3
)
PATIENT = JobSettings(partition_retries=1000, retry_delay_s=0.05, retry_max_delay_s=0.2)
WORKERS, SLOTS = 3, 2
HARMS = ("deadlock", "injected", "cancelled", "terminated")
SABOTAGE = re.compile(
    "sabotage|deadlock detected|canceling statement|terminating connection|server closed the connection"
)


@pytest.mark.timeout(180)
@pytest.mark.resilience_long
def test_a_fleet_on_a_sabotaged_server_loses_nothing_and_does_nothing_twice(
    own_server: EmbeddedPostgres, own_fleet: Fleet, ledgers: Ledgers
) -> None:
    _sabotage(own_server, own_fleet, ledgers, partitions=200, seconds=10)


@pytest.mark.resilience_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(3))
def test_a_fleet_on_a_server_that_is_sabotaged_for_long_loses_nothing_and_does_nothing_twice(
    own_server: EmbeddedPostgres, own_fleet: Fleet, ledgers: Ledgers, run: int
) -> None:
    _sabotage(own_server, own_fleet, ledgers, partitions=900, seconds=60)


def _sabotage(server: EmbeddedPostgres, fleet: Fleet, ledgers: Ledgers, *, partitions: int, seconds: float) -> None:
    seed = new_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    fleet.timings = TIMINGS
    for number in range(WORKERS):
        fleet.start(f"n{number}", imports=STEPS, concurrency=SLOTS, wait=False)
    nodes = {node.wait_until_live().node_id for node in fleet.nodes}
    saboteur = Saboteur(server, fleet.database, ledgers.table, rng)
    plan = [
        partition
        for number in range(partitions * 3 // 4)
        for partition in ledgers.plan(
            1, transferable=True, prefix=f"p{number}-", units=2, pause_s=0.08, failures=number % 3
        )
    ]
    once = fleet.submit(ledgers.plan(partitions // 4, transferable="until_started", units=2, pause_s=0.08), step=STEP)
    movable = fleet.submit(plan, settings=PATIENT, step=STEP)
    jobs = [movable, once]
    begun = time.monotonic()
    with saboteur.at_work():
        while any(job.execution().status.is_active for job in jobs):
            if time.monotonic() > begun + seconds and all(saboteur.met()[harm] for harm in HARMS):
                break
            let_time_pass(0.2)
    sabotaged_s = time.monotonic() - begun
    for job in jobs:
        job.ends(timeout_s=120)
    took_s = time.monotonic() - begun

    verdict = ledgers.verdict([job.id for job in jobs])
    met = saboteur.met()
    print(f"sabotaged for {sabotaged_s:.0f} of {took_s:.0f} s: {dict(saboteur.done)}, met: {met}; {verdict}")
    assert saboteur.broken == []
    assert all(met[harm] for harm in HARMS), met
    assert verdict.faults == []
    assert movable.counts() == {"COMPLETED": len(plan)}
    for row in ledgers.partitions([once.id]):
        assert row.policy is TransferPolicy.UNTIL_STARTED
        if row.status != PartitionStatus.COMPLETED:
            assert row.status == PartitionStatus.FAILED, row
            assert SABOTAGE.search(headline(row.exit_message)), row
    statuses = {node.node_id: node.status for node in fleet.repository.nodes.all(include_removed=True)}
    assert statuses == dict.fromkeys(nodes, NodeStatus.ACTIVE)
