"""Nodes whose sessions have other time zones, or whose own clock is wrong: the database's clock alone is believed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sqlalchemy import text

from airflow_dbpartition.domain import JobSettings
from tests.resilience.chaos import let_time_pass
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.worker.processes import QUICK, Fleet, wait_until

ZONES = ("America/New_York", "Asia/Kolkata", "UTC")
PATIENT = JobSettings(partition_retries=10, retry_delay_s=0.05)


def _is_judged_rightly(fleet: Fleet, ledgers: Ledgers) -> None:
    """Who lives stays ACTIVE for much longer than remove_after; who is killed is removed."""
    for node in fleet.nodes:
        node.wait_until_live()
    job = fleet.submit(ledgers.plan(60, transferable=True, units=2, pause_s=0.1), settings=PATIENT, step=STEP)
    let_time_pass(2 * QUICK.remove_after_s)
    assert job.ends(timeout_s=30) == "COMPLETED"
    assert [view.status.value for node in fleet.nodes for view in node.views()] == ["ACTIVE"] * len(fleet.nodes)
    assert all(0 <= view.heartbeat_age_s < QUICK.remove_after_s for node in fleet.nodes for view in node.views())

    dead, *living = fleet.nodes
    lost = fleet.submit(
        ledgers.plan(2, transferable=True, prefix="lost", units=8, pause_s=0.2),
        to=dead.node_id,
        settings=JobSettings(stealing=False),
        step=STEP,
    )
    lost.wait_for_counts(CLAIMED=1, PENDING=1)
    dead.send(signal.SIGKILL)
    wait_until(lambda: dead.views()[0].status.value == "REMOVED", "the dead one is removed", logs=fleet.log_paths)
    assert lost.ends(timeout_s=30) == "COMPLETED"
    assert [view.status.value for node in living for view in node.views()] == ["ACTIVE"] * len(living)
    assert ledgers.verdict([job.id, lost.id]).faults == []


@pytest.mark.resilience_long
def test_nodes_in_other_time_zones_judge_one_another_rightly(own_fleet: Fleet, ledgers: Ledgers) -> None:
    with own_fleet.repository.engine.begin() as connection:
        connection.execute(text("ALTER ROLE postgres SET TimeZone = 'Australia/Lord_Howe'"))
    try:
        for number, zone in enumerate(ZONES):
            own_fleet.start(f"n{number}", imports=STEPS, environment={"PGTZ": zone, "TZ": zone}, wait=False)
        own_fleet.start("role", imports=STEPS, wait=False)
        _is_judged_rightly(own_fleet, ledgers)
    finally:
        with own_fleet.repository.engine.begin() as connection:
            connection.execute(text("ALTER ROLE postgres RESET TimeZone"))


@pytest.mark.resilience_long
@pytest.mark.parametrize("offset", ["+1h", "-30m"])
def test_a_node_whose_clock_is_far_off_judges_and_is_judged_rightly(
    own_fleet: Fleet, ledgers: Ledgers, offset: str
) -> None:
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("libfaketime is not installed (on Debian: apt install libfaketime)")
    wrong = {"LD_PRELOAD": str(libraries[0]), "FAKETIME": offset}
    own_fleet.start("right", imports=STEPS, wait=False)
    own_fleet.start("wrong", imports=STEPS, environment=wrong, wait=False)
    own_fleet.start("witness", imports=STEPS, wait=False)
    _is_judged_rightly(own_fleet, ledgers)
    assert own_fleet.nodes[1].log.splitlines()[0][:15] != own_fleet.nodes[0].log.splitlines()[0][:15]  # it is off
