"""The database is gone for a while: everybody waits and goes on, and nobody is taken for dead by the first one back."""

from __future__ import annotations

import random
import signal
import time

import pytest

from airflow_dbpartition.config import Timings
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.domain import JobSettings, NodeStatus, Partition, PartitionStatus, TransferPolicy
from tests.resilience.chaos import let_time_pass, new_seed
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.worker.processes import CALM, Fleet, Job, wait_until

FAST = Timings(heartbeat_s=0.3, unreachable_after_s=1.0, remove_after_s=3.0, sweep_s=0.3, poll_s=0.3, steal_after_s=0.3)
PATIENT = JobSettings(partition_retries=50, retry_delay_s=0.05, retry_max_delay_s=0.2)
WORKERS, SLOTS = 3, 2


@pytest.mark.timeout(120)
@pytest.mark.resilience_long
def test_an_outage_longer_than_remove_after_evicts_nobody_and_loses_nothing(
    own_server: EmbeddedPostgres, own_fleet: Fleet, ledgers: Ledgers
) -> None:
    _outage(own_server, own_fleet, ledgers, timings=FAST, outage_s=5.0)


@pytest.mark.resilience_long
@pytest.mark.timeout(600)
def test_an_outage_of_45_s_with_the_default_thresholds_evicts_nobody(
    own_server: EmbeddedPostgres, own_fleet: Fleet, ledgers: Ledgers
) -> None:
    _outage(own_server, own_fleet, ledgers, timings=Timings(), outage_s=45.0)


def _outage(server: EmbeddedPostgres, fleet: Fleet, ledgers: Ledgers, *, timings: Timings, outage_s: float) -> None:
    fleet.timings = timings
    movable, fixed, lazy = jobs = _begin(fleet, ledgers)
    before = {node.node_id for node in fleet.repository.nodes.all()}
    wait_until(lambda: _counts(jobs).get("COMPLETED", 0) > 10, "the work is under way", logs=fleet.log_paths)

    server.stop(mode="immediate")
    let_time_pass(outage_s)
    late = fleet.nodes[-1]
    late.send(signal.SIGSTOP)
    server.start()
    back_at = time.monotonic()
    wait_until(lambda: _first_is_back(fleet), "the first one is back")
    let_time_pass(timings.remove_after_s / 3)  # it could have judged many times
    late.send(signal.SIGCONT)
    for job in jobs:
        job.ends(timeout_s=2 * timings.remove_after_s + 30)
    took_s = time.monotonic() - back_at

    verdict = ledgers.verdict([job.id for job in jobs])
    print(f"outage of {outage_s:g} s: all had ended {took_s:.1f} s after it; {verdict}")
    assert verdict.faults == []
    nodes = fleet.repository.nodes.all(include_removed=True)
    assert {node.node_id: node.status for node in nodes} == dict.fromkeys(before, NodeStatus.ACTIVE)
    assert movable.counts() == {"COMPLETED": 60}
    assert not {"lost", "reassigned"} & {event for job in jobs for event in job.events()}
    # What ran and may not run again is lost with its connection; what had not been started is not.
    entered = {entry.key for entry in ledgers.outside()}
    failed = [row for row in ledgers.partitions([fixed.id, lazy.id]) if row.status == PartitionStatus.FAILED]
    assert all(row.entry_key in entered for row in failed)
    assert len(failed) <= WORKERS * SLOTS


@pytest.mark.resilience_long
@pytest.mark.timeout(180)
def test_a_database_that_dies_again_and_again_loses_nothing(
    own_server: EmbeddedPostgres, own_fleet: Fleet, ledgers: Ledgers
) -> None:
    seed = new_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    own_fleet.timings = CALM
    jobs = _begin(own_fleet, ledgers)
    times = 0
    while sum(_counts(jobs).get(status, 0) for status in ("COMPLETED", "FAILED")) < 90 and times < 5:
        let_time_pass(rng.uniform(0.3, 1.2))
        if rng.random() < 0.5:
            own_server.kill()
        else:
            own_server.stop(mode="immediate")
        own_server.start()
        times += 1
    for job in jobs:
        job.ends(timeout_s=60)

    verdict = ledgers.verdict([job.id for job in jobs])
    print(f"the server died {times} times: {verdict}")
    assert verdict.faults == []
    assert jobs[0].counts() == {"COMPLETED": 60}
    assert {node.status for node in own_fleet.repository.nodes.all(include_removed=True)} == {NodeStatus.ACTIVE}


def _first_is_back(fleet: Fleet) -> bool:
    return any(node.heartbeat_age_s < fleet.timings.heartbeat_s for node in fleet.repository.nodes.all())


def _begin(fleet: Fleet, ledgers: Ledgers) -> tuple[Job, Job, Job]:
    """Three workers, and of each transfer policy a job."""
    for number in range(WORKERS):
        fleet.start(f"n{number}", imports=STEPS, concurrency=SLOTS, wait=False)
    nodes = [node.wait_until_live().node_id for node in fleet.nodes]
    plans: list[tuple[bool | str, JobSettings, int]] = [
        (True, PATIENT, 60),
        (False, JobSettings(), 30),
        ("until_started", JobSettings(), 30),
    ]
    jobs: list[Job] = []
    for transferable, settings, count in plans:
        plan: list[Partition] = ledgers.plan(count, transferable=transferable, units=3, pause_s=0.08)
        jobs.append(fleet.submit(plan, to=nodes[len(jobs)], settings=settings, step=STEP))
    movable, fixed, lazy = jobs
    assert ledgers.partitions([movable.id])[0].policy is TransferPolicy.ALWAYS
    return movable, fixed, lazy


def _counts(jobs: tuple[Job, ...]) -> dict[str, int]:
    total: dict[str, int] = {}
    for job in jobs:
        for status, count in job.counts().items():
            total[status] = total.get(status, 0) + count
    return total
