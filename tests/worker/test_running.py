"""Workers at work: what they take, what they leave to others, and how they end when nothing is left."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from airflow_dbpartition.domain import JobSettings, Partition
from tests.worker.processes import CALM, HERE, OTHER_STEPS, Fleet, wait_until


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_job_runs_to_its_end(fleet: Fleet, executor: str) -> None:
    node = fleet.start(concurrency=2, executor=executor)
    job = fleet.submit(6)

    assert job.ends() == "COMPLETED"
    assert job.counts() == {"COMPLETED": 6}
    results = [row.result for row in job.partitions().values()]
    assert [result["number"] for result in results] == list(range(6))
    in_the_supervisor = {result["pid"] == node.pid for result in results}
    assert in_the_supervisor == {executor == "thread"}
    assert job.events() == []


def test_a_step_may_be_a_coroutine(postgres_fleet: Fleet) -> None:
    postgres_fleet.start()
    job = postgres_fleet.submit(context={"do": "wait_asynchronously"})

    assert job.ends() == "COMPLETED"
    assert job.partition().result == "awaited"


def test_a_worker_without_the_step_never_takes_it(postgres_fleet: Fleet) -> None:
    without = postgres_fleet.start("without", imports=OTHER_STEPS)
    given = postgres_fleet.submit(2, to=without.node_id, transferable=True)
    other = postgres_fleet.submit([Partition("p0", {})], step="something else")

    assert other.ends() == "COMPLETED"  # it looks for work
    assert given.counts() == {"PENDING": 2}
    postgres_fleet.start("with")
    assert given.ends() == "COMPLETED"
    assert {row.result["node"].split("-")[0] for row in given.partitions().values()} == {"with"}


def test_a_worker_takes_nothing_of_another_group(postgres_fleet: Fleet) -> None:
    postgres_fleet.start("small")
    for_large = postgres_fleet.submit(2, node_group="large")
    for_all = postgres_fleet.submit(2)

    assert for_all.ends() == "COMPLETED"
    assert for_large.counts() == {"PENDING": 2}
    postgres_fleet.start("large", node_group="large")
    assert for_large.ends() == "COMPLETED"
    assert {row.result["node"].split("-")[0] for row in for_large.partitions().values()} == {"large"}


def test_work_that_is_assigned_to_nobody_is_shared(postgres_fleet: Fleet) -> None:
    for name in ("left", "right"):
        postgres_fleet.start(name)
    job, gate = postgres_fleet.gated(4)

    job.wait_for_counts(CLAIMED=2, PENDING=2)  # each claims no more than it can run
    running = {row.assigned_node for row in job.partitions().values() if row.status.value == "CLAIMED"}
    assert {str(node).split("-")[0] for node in running} == {"left", "right"}
    gate.touch()
    assert job.ends() == "COMPLETED"


@pytest.mark.parametrize("stealing", [True, False])
def test_an_idle_node_takes_what_waits_for_a_busy_one_where_the_job_lets_it(
    postgres_fleet: Fleet, stealing: bool
) -> None:
    busy = postgres_fleet.start("busy")
    settings = JobSettings(stealing=stealing)
    job, gate = postgres_fleet.gated(3, to=busy.node_id, settings=settings)
    job.wait_for_counts(CLAIMED=1, PENDING=2)
    late = postgres_fleet.start("late")

    if stealing:
        job.wait_for_counts(CLAIMED=2, PENDING=1)
    else:
        assert postgres_fleet.submit(to=late.node_id).ends() == "COMPLETED"
        assert job.counts() == {"CLAIMED": 1, "PENDING": 2}
    gate.touch()
    assert job.ends() == "COMPLETED"
    ran_by = {row.result["node"].split("-")[0] for row in job.partitions().values()}
    assert ran_by == ({"busy", "late"} if stealing else {"busy"})
    assert ("stolen" in job.events()) is stealing


def test_what_may_never_move_is_left_to_the_busy_node(postgres_fleet: Fleet) -> None:
    busy = postgres_fleet.start("busy")
    job, gate = postgres_fleet.gated(2, to=busy.node_id, transferable=False)
    job.wait_for_counts(CLAIMED=1, PENDING=1)
    late = postgres_fleet.start("late")

    assert postgres_fleet.submit(to=late.node_id).ends() == "COMPLETED"
    assert job.counts() == {"CLAIMED": 1, "PENDING": 1}
    gate.touch()
    assert job.ends() == "COMPLETED"
    assert {row.result["node"] for row in job.partitions().values()} == {busy.node_id}


def test_a_failed_attempt_is_made_again_after_a_pause_that_grows(fleet: Fleet) -> None:
    fleet.start()
    settings = JobSettings(partition_retries=2, retry_delay_s=0.5)
    began = time.monotonic()
    job = fleet.submit(context={"do": "fail_at_first", "failures": 2}, settings=settings)

    assert job.ends() == "COMPLETED"
    assert time.monotonic() - began >= 0.5 * 0.5 + 0.5 * 1.0  # jitter halves the pause at most
    assert job.partition().attempt == 3
    assert job.events() == ["retried", "retried"]


def test_a_failed_attempt_is_made_again_when_it_is_due_and_not_at_the_next_poll(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(timings=replace(CALM, poll_s=300))
    settings = JobSettings(partition_retries=3, retry_delay_s=0.2)
    job = postgres_fleet.submit(2, context={"do": "fail_at_first", "failures": 3}, settings=settings)

    assert job.ends(timeout_s=30) == "COMPLETED"


def test_when_the_retries_are_used_up_the_partition_fails_with_the_last_error(postgres_fleet: Fleet) -> None:
    postgres_fleet.start()
    settings = JobSettings(partition_retries=1, retry_delay_s=0.01)
    job = postgres_fleet.submit(context={"do": "fail_at_first", "failures": 2}, settings=settings)

    assert job.ends() == "FAILED"
    assert job.events() == ["retried", "failed"]
    assert str(job.partition().exit_message).endswith("ValueError: attempt 2 fails")


def test_a_draining_worker_ends_with_0_when_all_its_work_went_well(fleet: Fleet) -> None:
    job = fleet.submit(4)
    node = fleet.start(drain=True, concurrency=2, wait=False)

    assert node.exits() == 0
    assert job.execution().status.value == "COMPLETED"
    assert node.views(include_removed=False) == []


def test_a_draining_worker_ends_with_3_when_a_partition_failed(fleet: Fleet) -> None:
    good, bad = fleet.submit(2), fleet.submit(context={"do": "raise_error"})
    node = fleet.start(drain=True, wait=False)

    assert node.exits() == 3
    assert (good.execution().status.value, bad.execution().status.value) == ("COMPLETED", "FAILED")


def test_a_draining_worker_that_finds_nothing_ends_at_once(postgres_fleet: Fleet) -> None:
    assert postgres_fleet.start(drain=True, wait=False).exits() == 0


def test_a_draining_worker_waits_for_work_as_long_as_it_is_told(postgres_fleet: Fleet) -> None:
    began = time.monotonic()
    node = postgres_fleet.start(drain=True, idle_timeout=2)
    job = postgres_fleet.submit()

    assert job.ends() == "COMPLETED"
    done = time.monotonic()
    assert node.exits() == 0
    assert time.monotonic() - began >= 2
    assert time.monotonic() - done >= 1  # the time begins again after the work


def test_a_draining_worker_waits_for_a_retry_that_is_not_due_yet(postgres_fleet: Fleet) -> None:
    settings = JobSettings(partition_retries=1, retry_delay_s=1.5)
    job = postgres_fleet.submit(context={"do": "fail_at_first"}, settings=settings)

    assert postgres_fleet.start(drain=True, wait=False).exits() == 0
    assert job.counts() == {"COMPLETED": 1}


def test_a_worker_at_rest_holds_two_connections_and_listens_on_one(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start(concurrency=3)
    job, gate = postgres_fleet.gated(3, do="count")  # each has a connection of its own
    postgres_fleet.wait_for_note("committed-3", times=3)
    assert connections(postgres_fleet).count("dbpartition step") == 3
    gate.touch()
    assert job.ends() == "COMPLETED"

    wait_until(lambda: len(connections(postgres_fleet)) <= 2, "idle children have let go of theirs")
    assert connections(postgres_fleet) == ["dbpartition heartbeat", "dbpartition worker"]
    assert len(node.children()) == 3


def test_new_work_is_taken_at_once_and_not_at_the_next_poll(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(timings=replace(CALM, poll_s=300))

    for _ in range(3):  # the first while the worker may not listen yet
        assert postgres_fleet.submit(2).ends(timeout_s=30) == "COMPLETED"


def test_a_stop_is_heard_at_once_and_not_at_the_next_heartbeat(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(timings=replace(CALM, heartbeat_s=60, unreachable_after_s=200, remove_after_s=300))
    job, _gate = postgres_fleet.gated(2)
    job.wait_for_counts(CLAIMED=1, PENDING=1)
    job.stop()

    assert job.ends(timeout_s=30) == "STOPPED"
    assert job.counts() == {"STOPPED": 2}


def test_a_step_that_does_not_end_when_it_is_stopped_is_killed(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(stop_grace=0.5)
    job, _gate = postgres_fleet.gated(polite=False)
    postgres_fleet.wait_for_note("begun")
    job.stop()

    assert job.ends() == "STOPPED"
    assert postgres_fleet.notes("ended") == []
    assert postgres_fleet.submit().ends() == "COMPLETED"


def test_a_worker_runs_with_workers_imports_only(postgres_fleet: Fleet, tmp_path: Path) -> None:
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text("import sys\nfor name in ('airflow', 'pandas', 'httpx'):\n    sys.modules[name] = None\n")
    postgres_fleet.start(environment={"PYTHONPATH": str(tmp_path)})

    assert postgres_fleet.submit(2).ends() == "COMPLETED"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"imports": Path("no_such_module.py")}, 1, "cannot import no_such_module.py"),
        ({"executor": "fibre"}, 2, 'expected executor to be "process" or "thread"'),
        ({"unreachable_after": 0.1}, 2, "expected unreachable_after to be at least 3 x heartbeat"),
        ({"imports": HERE / "__init__.py"}, 1, "no step is registered"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    postgres_fleet: Fleet, options: dict[str, Any], code: int, words: str
) -> None:
    node = postgres_fleet.start(wait=False, **options)

    assert node.exits() == code
    assert words in " ".join(re.sub(r"[│╭╮╰╯─\n]", " ", node.log).split())
    assert node.views() == []


def connections(fleet: Fleet) -> list[str]:
    """What the workers' connections to this test's database are called."""
    query = text(
        "SELECT application_name FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'dbpartition _%' ORDER BY 1"
    )
    with fleet.repository.engine.connect() as connection:
        return list(connection.execute(query).scalars())
