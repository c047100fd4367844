"""How workers end: asked to, asked twice, interrupted, killed; and what becomes of their work."""

from __future__ import annotations

import signal

import pytest

from airflow_dbpartition.domain import JobSettings
from tests.worker.processes import Fleet, is_alive, wait_until


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_end_finishes_what_it_runs_and_takes_nothing_more(
    postgres_fleet: Fleet, signal_number: int, executor: str
) -> None:
    node = postgres_fleet.start(concurrency=2, executor=executor)
    job, gate = postgres_fleet.gated(4, polite=False)
    postgres_fleet.wait_for_note("begun", times=2)  # what has not begun would be given back
    node.send(signal_number)
    node.says("draining")

    wait_until(lambda: node.views()[0].status.value == "DRAINING", "the others see it drain")
    gate.touch()
    assert node.exits() == 0
    assert job.counts() == {"COMPLETED": 2, "PENDING": 2}
    assert job.events() == []
    assert node.views()[0].status.value == "REMOVED"


def test_a_worker_that_ends_on_any_database_leaves_nothing_claimed(fleet: Fleet) -> None:
    node = fleet.start(concurrency=2, grace=0)
    job, gate = fleet.gated(4, transferable=True)
    job.wait_for_counts(CLAIMED=2, PENDING=2)
    node.send(signal.SIGTERM)

    assert node.exits() == 0
    assert job.counts() == {"PENDING": 4}
    assert [row.attempt for row in job.partitions().values()] == [0, 0, 0, 0]  # an interruption is no attempt
    gate.touch()
    fleet.start("next")
    assert job.ends() == "COMPLETED"


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_after_the_grace_what_may_run_again_is_given_to_a_live_node_at_once(
    postgres_fleet: Fleet, executor: str
) -> None:
    node = postgres_fleet.start("leaving", grace=0.3, executor=executor)
    job, gate = postgres_fleet.gated(transferable=True)
    first = postgres_fleet.wait_for_note("begun")
    postgres_fleet.start("staying")
    node.send(signal.SIGTERM)

    second = postgres_fleet.wait_for_note("begun", times=2)
    assert node.exits() == 0
    assert second.node_id.startswith("staying-")
    assert second.idempotency_key == first.idempotency_key
    assert second.attempt == 1
    gate.touch()
    assert job.ends() == "COMPLETED"
    assert "released" in job.events()
    assert job.partition().node_losses == 0


@pytest.mark.parametrize("transferable", ["until_started", False])
def test_after_the_grace_what_may_not_run_again_is_failed_and_says_why(
    postgres_fleet: Fleet, transferable: bool | str
) -> None:
    node = postgres_fleet.start("leaving", grace=0.3)
    job, _gate = postgres_fleet.gated(2, to=node.node_id, transferable=transferable)
    begun = postgres_fleet.wait_for_note("begun")
    postgres_fleet.start("staying")
    if transferable == "until_started":
        job.wait_for_counts(CLAIMED=2)  # the second has moved
    node.send(signal.SIGTERM)

    assert node.exits() == 0
    row = job.wait_for(begun.partition_key, status="FAILED")
    assert "interrupted while it ran" in str(row.exit_message)
    assert "not transferable, so not run again" in str(row.exit_message)
    others = {other.status.value for key, other in job.partitions().items() if key != begun.partition_key}
    assert others == ({"FAILED"} if transferable is False else {"CLAIMED"})


def test_a_step_that_ignores_the_request_is_killed(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start(grace=0)
    job, _gate = postgres_fleet.gated(polite=False, transferable=True)
    begun = postgres_fleet.wait_for_note("begun")
    node.send(signal.SIGTERM)

    assert node.exits() == 0
    assert not is_alive(begun.pid)
    assert job.counts() == {"PENDING": 1}
    assert postgres_fleet.notes("ended") == []


def test_a_second_request_shortens_the_wait(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start(grace=1000)
    job, _gate = postgres_fleet.gated(transferable=True)
    postgres_fleet.wait_for_note("begun")
    node.send(signal.SIGTERM)
    node.says("draining")
    node.send(signal.SIGTERM)

    assert node.exits() == 0
    assert job.counts() == {"PENDING": 1}


def test_a_node_that_a_person_drains_ends_as_if_it_were_signalled(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start()
    job, gate = postgres_fleet.gated(transferable=True)
    postgres_fleet.wait_for_note("begun")
    assert postgres_fleet.repository.nodes.drain(node.node_id)
    node.says("asked to drain")
    gate.touch()

    assert node.exits() == 0
    assert job.ends() == "COMPLETED"


def test_what_waits_at_a_worker_that_ends_is_given_to_the_others_while_it_still_runs(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start("leaving", prefetch=1)
    other = postgres_fleet.start("staying")
    _occupied, other_gate = postgres_fleet.gated(to=other.node_id)
    postgres_fleet.wait_for_note("begun")
    job, gate = postgres_fleet.gated(3, to=node.node_id)
    postgres_fleet.wait_for_note("begun", times=2)
    job.wait_for_counts(CLAIMED=2, PENDING=1)  # one runs, one is fetched ahead, one waits
    node.send(signal.SIGTERM)

    def moved() -> bool:
        owners = [row.assigned_node for row in job.partitions().values()]
        return owners[0] == node.node_id and set(owners[1:]) <= {other.node_id, None}

    wait_until(moved, "it keeps only what it runs", logs=[node.log_path])
    assert job.counts() == {"CLAIMED": 1, "PENDING": 2}
    other_gate.touch()
    gate.touch()
    assert job.ends() == "COMPLETED"
    assert node.exits() == 0
    assert job.events() == ["released", "reassigned"]


def test_when_a_worker_is_killed_its_children_die_and_others_take_what_may_move(quick_fleet: Fleet) -> None:
    doomed = quick_fleet.start("doomed", concurrency=2)
    movable, gate = quick_fleet.gated(polite=False, transferable=True)
    fixed, _other_gate = quick_fleet.gated(polite=False, transferable=False)
    pids = [quick_fleet.wait_for_note("begun", times=times).pid for times in (1, 2)]
    quick_fleet.start("heir")
    doomed.send(signal.SIGKILL)

    wait_until(lambda: not any(is_alive(pid) for pid in pids), "its children are dead", timeout_s=2)
    assert fixed.ends() == "FAILED"
    assert "was lost" in str(fixed.partition().exit_message)
    assert fixed.events() == ["lost", "failed"]
    heir = quick_fleet.wait_for_note("begun", times=3)
    assert heir.node_id.startswith("heir-")
    gate.touch()
    assert movable.ends() == "COMPLETED"
    assert movable.events() == ["lost", "reassigned"]
    assert movable.partition().node_losses == 1
    assert [view.status.value for view in doomed.views()] == ["REMOVED"]


def test_a_partition_that_kills_node_after_node_is_given_up(quick_fleet: Fleet) -> None:
    settings = JobSettings(transferable="always", max_node_losses=2)
    job, _gate = quick_fleet.gated(polite=False, settings=settings)
    names = ["first", "second", "third"]
    nodes = {name: quick_fleet.start(name) for name in names}
    for times in (1, 2):
        begun = quick_fleet.wait_for_note("begun", times=times)
        nodes[begun.node_id.split("-")[0]].send(signal.SIGKILL)

    assert job.ends() == "FAILED"
    assert job.partition().node_losses == 2
    assert len(quick_fleet.notes("begun")) == 2
