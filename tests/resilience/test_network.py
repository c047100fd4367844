"""Workers behind networks that freeze, break, delay and refuse, and behind a pooler that has no LISTEN."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest

from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.domain import JobSettings, PartitionStatus, TransferPolicy
from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.repository import JobRepository
from benchmarks.pgbouncer import PgBouncerMissingError, pgbouncer
from tests.resilience.chaos import let_time_pass, new_seed
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.resilience.wire import Moment, WireProxy
from tests.worker.processes import Fleet

TIMINGS = Timings(
    heartbeat_s=0.4, unreachable_after_s=1.5, remove_after_s=3.0, sweep_s=0.3, poll_s=0.3, steal_after_s=0.3
)
PATIENT = JobSettings(partition_retries=100, retry_delay_s=0.05, retry_max_delay_s=0.2, max_node_losses=100)


@pytest.mark.resilience_long
@pytest.mark.timeout(150)
def test_a_fleet_behind_bad_networks_loses_nothing_and_does_nothing_twice(own_fleet: Fleet, ledgers: Ledgers) -> None:
    seed = new_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    harms = dict.fromkeys(("frozen", "cut", *(moment.value for moment in Moment)), 0)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(WireProxy(own_fleet.database.url)) for _ in range(3)]
        for number, proxy in enumerate(proxies):
            own_fleet.start(f"n{number}", url=proxy.url, timings=TIMINGS, imports=STEPS, concurrency=2, wait=False)
        for node in own_fleet.nodes:
            node.wait_until_live()
        jobs = [
            own_fleet.submit(ledgers.plan(150, transferable=True, units=2, pause_s=0.05), settings=PATIENT, step=STEP),
            own_fleet.submit(ledgers.plan(60, transferable="until_started", units=2, pause_s=0.05), step=STEP),
        ]
        restore_at: dict[WireProxy, float] = {}
        while any(job.execution().status.is_active for job in jobs):
            now = time.monotonic()
            for proxy in [proxy for proxy, moment in restore_at.items() if moment <= now]:
                proxy.restore()
                del restore_at[proxy]
            well = [proxy for proxy in proxies if proxy not in restore_at]
            if len(well) > 1 and sum(harms.values()) < 40:
                proxy, harm = rng.choice(well), rng.choice(list(harms))
                harms[harm] += 1
                if harm == "frozen":
                    proxy.freeze()
                elif harm == "cut":
                    proxy.cut()
                else:
                    proxy.break_at(Moment(harm))
                if harm in ("frozen", "cut"):
                    restore_at[proxy] = now + rng.choice((0.5, 1.5 * TIMINGS.remove_after_s))
            let_time_pass(rng.uniform(0.1, 0.6))

    verdict = ledgers.verdict([job.id for job in jobs])
    print(f"{harms}: {verdict}")
    assert verdict.faults == []
    assert jobs[0].counts() == {"COMPLETED": 150}
    entered = {entry.key for entry in ledgers.outside()}
    for row in ledgers.partitions([jobs[1].id]):
        assert row.policy is TransferPolicy.UNTIL_STARTED
        assert row.status in (PartitionStatus.COMPLETED, PartitionStatus.FAILED)
        assert row.entry_key in entered or row.status == PartitionStatus.FAILED


@pytest.mark.resilience_long
def test_200_ms_of_latency_evict_nobody_and_lose_nothing(own_fleet: Fleet, ledgers: Ledgers) -> None:
    # With the default thresholds: a heartbeat is some six round trips, and has half of unreachable_after for them.
    with WireProxy(own_fleet.database.url, latency_s=0.2) as proxy:
        node = own_fleet.start(url=proxy.url, timings=Timings(), imports=STEPS, concurrency=2)
        job = own_fleet.submit(ledgers.plan(4, transferable=False), step=STEP)
        assert job.ends(timeout_s=60) == "COMPLETED"
        assert [view.status.value for view in node.views()] == ["ACTIVE"]
    assert ledgers.verdict([job.id]).faults == []


def test_a_worker_that_is_refused_at_its_start_says_so_and_ends(own_fleet: Fleet) -> None:
    with WireProxy(own_fleet.database.url) as proxy:
        proxy.cut()
        node = own_fleet.start(url=proxy.url, imports=STEPS, wait=False)
        assert node.exits() not in (0, 3, 75)
        assert node.log.strip().splitlines()[-1].startswith("error: database ")
        assert "Traceback" not in node.log
        assert node.views() == []


def test_without_listen_work_flows_by_polling(own_fleet: Fleet, ledgers: Ledgers) -> None:
    own_fleet.start(imports=STEPS, listen=False)
    job = own_fleet.submit(ledgers.plan(5, transferable=False), step=STEP)
    assert job.ends() == "COMPLETED"
    assert ledgers.verdict([job.id]).faults == []


@pytest.fixture
def pooled_url(own_fleet: Fleet) -> Iterator[str]:
    """The fleet's database behind PgBouncer in transaction mode."""
    with contextlib.ExitStack() as stack:
        try:
            pooler = stack.enter_context(pgbouncer(own_fleet.database.url, clients=100, pool_size=4))
        except PgBouncerMissingError as error:
            pytest.skip(str(error))
        yield pooler.url


def test_behind_a_pooler_in_transaction_mode_work_still_flows(
    own_fleet: Fleet, ledgers: Ledgers, pooled_url: str
) -> None:
    for name in ("left", "right"):
        own_fleet.start(name, url=pooled_url, timings=TIMINGS, imports=STEPS, concurrency=3, wait=False)
    for node in own_fleet.nodes:
        node.wait_until_live()
    jobs = [
        own_fleet.submit(ledgers.plan(30, transferable=True, units=2), settings=PATIENT, step=STEP) for _ in range(2)
    ]
    assert [job.ends(timeout_s=30) for job in jobs] == ["COMPLETED"] * 2
    assert ledgers.verdict([job.id for job in jobs]).faults == []
    assert [event for job in jobs for event in job.events() if event != "stolen"] == []
    assert len(own_fleet.repository.nodes.all()) == 2


def test_a_network_that_goes_silent_just_after_the_login_is_given_up(own_repository: JobRepository) -> None:
    with WireProxy(own_repository.engine.url.render_as_string(hide_password=False), mute=True) as proxy:
        repository = JobRepository.connect(DatabaseConfig(url=proxy.url), deadline_s=1.0)
        begun = time.monotonic()
        with pytest.raises(DatabaseError):
            repository.nodes.all()
        assert time.monotonic() - begun < 30.0, "six tries of a second, and the pauses between them"
        repository.close()
