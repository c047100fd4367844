"""Randomised chaos: workers killed, frozen, stopped and joined at random while many partitions are run."""

from __future__ import annotations

import random
import time

import pytest
from sqlalchemy import func, select

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import JobIdentity, JobSettings, PartitionStatus, TransferPolicy
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.repository import JobRepository
from tests.resilience.chaos import Chaos, new_seed
from tests.resilience.ledgers import STEP, Ledgers
from tests.worker.processes import Fleet, wait_until

WORKERS = 6
LONG_SHARE = 0.04  # of the partitions last for long enough that a zombie finds its heir in the middle of them
TIMINGS = Timings(
    heartbeat_s=0.4, unreachable_after_s=1.5, remove_after_s=3.0, sweep_s=0.3, poll_s=0.3, steal_after_s=0.3
)
PATIENT = JobSettings(partition_retries=1000, retry_delay_s=0.05, retry_max_delay_s=0.2, max_node_losses=1000)
ONCE = JobSettings(max_node_losses=1000)
TWICE = JobSettings(partition_retries=1, retry_delay_s=0.05, max_node_losses=1000)


@pytest.mark.timeout(180)
def test_chaos_loses_nothing_and_does_nothing_twice(own_fleet: Fleet, ledgers: Ledgers) -> None:
    _chaos(own_fleet, ledgers, partitions=600, pause_s=1.3, unit_pause_s=(0.02, 0.15), timeout_s=120)


@pytest.mark.resilience_long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", range(3))
def test_much_chaos_loses_nothing_and_does_nothing_twice(own_fleet: Fleet, ledgers: Ledgers, run: int) -> None:
    _chaos(own_fleet, ledgers, partitions=10_000, pause_s=1.5, unit_pause_s=(0.0, 0.06), timeout_s=1200)


def _chaos(
    fleet: Fleet,
    ledgers: Ledgers,
    *,
    partitions: int,
    pause_s: float,
    unit_pause_s: tuple[float, float],
    timeout_s: float,
) -> None:
    seed = new_seed()
    print(f"seed {seed}: DBPARTITION_RESILIENCE_SEED={seed} runs the same harms again")
    rng = random.Random(seed)
    fleet.timings = TIMINGS
    begun = time.monotonic()
    chaos = Chaos(fleet, WORKERS, rng, pause_s)
    chaos.begin()
    launcher = Launcher(fleet.repository, timings=TIMINGS)

    def launch(name: str, share: float, transferable: bool | str, settings: JobSettings, failures: int = 0) -> int:
        plan = [
            partition
            for number in range(round(partitions * share))
            for partition in ledgers.plan(
                1,
                transferable=transferable,
                prefix=f"p{number}-",
                units=10 if rng.random() < LONG_SHARE else rng.choice((1, 2, 3)),
                pause_s=rng.uniform(*unit_pause_s),
                failures=failures if rng.random() < 0.5 else 0,
            )
        ]
        return launcher.launch(Job(JobIdentity(name), STEP, lambda _grid: plan, settings=settings)).job_execution_id

    jobs = [
        launch("fixed", 0.1, False, ONCE),
        launch("retried", 0.1, "until_started", TWICE, failures=1),
        launch("until started", 0.2, "until_started", ONCE),
        launch("movable", 0.3, True, PATIENT, failures=2),
    ]
    planned_on = {key: node for job in jobs for key, node in _owners(fleet.repository, job).items()}
    total = sum(fleet.repository.reading.execution(job).partition_count for job in jobs)
    chaos.run_until(lambda: _finished(fleet.repository, jobs) > 0.5 * total, timeout_s=timeout_s)
    jobs += [launch("movable, late", 0.2, True, PATIENT), launch("until started, late", 0.1, "until_started", ONCE)]
    chaos.run_until(lambda: _finished(fleet.repository, jobs) > 0.8 * partitions, timeout_s=timeout_s)
    wait_until(
        lambda: not any(fleet.repository.reading.execution(job).status.is_active for job in jobs),
        "every execution ends",
        timeout_s=60,
        logs=fleet.log_paths,
    )
    took_s = time.monotonic() - begun

    verdict = ledgers.verdict(jobs, attempts={jobs[1]: 2})
    print(f"{took_s:.0f} s, {chaos}; {verdict}")
    assert verdict.faults == []
    buried = {_name_of(node_id) for node_id in _removed(fleet.repository)}
    assert buried <= chaos.harmed, "a live node was removed"
    for row in ledgers.partitions(jobs):
        if row.policy is TransferPolicy.ALWAYS:
            assert row.status == PartitionStatus.COMPLETED, row
        elif row.status != PartitionStatus.COMPLETED:
            assert row.status == PartitionStatus.FAILED, row
            assert row.assigned_node is not None, row
            assert _name_of(row.assigned_node) in chaos.harmed, row
        if row.policy is TransferPolicy.NEVER:
            assert row.assigned_node == planned_on[(row.job_execution_id, row.partition_key)], row


def _name_of(node_id: str) -> str:
    return node_id.rsplit("-", 1)[0]


def _owners(repository: JobRepository, job_execution_id: int) -> dict[tuple[int, str], str | None]:
    return {
        (job_execution_id, row.partition_key): row.assigned_node
        for row in repository.reading.partitions(job_execution_id)
    }


def _finished(repository: JobRepository, jobs: list[int]) -> int:
    p = repository.tables.partitions.c
    live = (PartitionStatus.PENDING.value, PartitionStatus.CLAIMED.value)
    query = select(func.count()).where(p.job_execution_id.in_(jobs), p.status.not_in(live))
    with repository.engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


def _removed(repository: JobRepository) -> list[str]:
    return [node.node_id for node in repository.nodes.all(include_removed=True) if node.status.value == "REMOVED"]
