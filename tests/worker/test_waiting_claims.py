"""Claims that wait in a worker for a process to run them: none begins when it is not to run here any more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.worker.processes import QUICK, STEPS, Fleet, Note, wait_until
from tests.worker.proxy import Proxy


def begun_by(fleet: Fleet, name: str) -> list[Note]:
    return [note for note in fleet.notes("begun") if note.node_id.startswith(f"{name}-")]


def test_what_waits_when_its_job_is_stopped_never_begins(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(prefetch=1, stop_grace=0.3)
    job, _gate = postgres_fleet.gated(2, polite=False)
    job.wait_for_counts(CLAIMED=2)
    postgres_fleet.wait_for_note("begun")
    job.stop()

    assert job.ends() == "STOPPED"
    assert job.counts() == {"STOPPED": 2}
    assert len(postgres_fleet.notes("begun")) == 1


def test_what_waits_when_its_claim_is_lost_never_begins(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start("first", prefetch=1)
    job, gate = postgres_fleet.gated(2, transferable=True)
    job.wait_for_counts(CLAIMED=2)
    begun = postgres_fleet.wait_for_note("begun")
    (waiting,) = [row for key, row in job.partitions().items() if key != begun.partition_key]
    postgres_fleet.start("second")
    # As a sweep does that takes the node for dead, but of one claim only: the row is free, and the second takes it.
    postgres_fleet.repository.settlements.release_unheld(
        node_id=node.node_id, step_execution_id=waiting.step_execution_id, version=1
    )
    postgres_fleet.wait_for_note("begun", times=2)
    node.says("claim lost")
    gate.touch()

    assert job.ends() == "COMPLETED"
    assert postgres_fleet.submit(to=node.node_id).ends() == "COMPLETED"  # it has gone through all that it holds
    assert [note.partition_key for note in begun_by(postgres_fleet, "second")] == [waiting.partition_key]
    assert len(begun_by(postgres_fleet, "first")) == 2


def test_what_waits_when_the_database_is_lost_does_not_begin(postgres_fleet: Fleet, tmp_path: Path) -> None:
    module, imported = tmp_path / "steps_that_tell.py", tmp_path / "imported"
    telling = f"\nwith Path({str(imported)!r}).open('a') as file:\n    file.write('once\\n')\n"
    module.write_text(STEPS.read_text() + telling)
    with Proxy(postgres_fleet.database.url) as proxy:
        lonely = postgres_fleet.start("lonely", imports=module, url=proxy.url, timings=QUICK, prefetch=1)
        job, gate = postgres_fleet.gated(2, polite=False, transferable=True)
        job.wait_for_counts(CLAIMED=2)
        postgres_fleet.wait_for_note("begun")
        postgres_fleet.start("heir", timings=QUICK, concurrency=2)
        proxy.cut()

        wait_until(lambda: len(begun_by(postgres_fleet, "heir")) == 2, "both have moved", logs=postgres_fleet.log_paths)
        wait_until(lambda: imported.read_text().count("once") == 2, "the lonely one has another child that is ready")
        proxy.restore()
        (new_life,) = wait_until(lambda: lonely.views(include_removed=False), "the lonely one is back")
        assert postgres_fleet.submit(to=new_life.node_id, transferable=False).ends() == "COMPLETED"
        gate.touch()
        assert job.ends() == "COMPLETED"
    begun = [note.node_id for note in begun_by(postgres_fleet, "lonely")]
    assert len([node_id for node_id in begun if node_id != new_life.node_id]) == 1


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_what_waits_behind_partitions_that_take_longer_than_those_before_is_given_back(
    postgres_fleet: Fleet, executor: str
) -> None:
    postgres_fleet.start("first", executor=executor, concurrency=2)
    assert postgres_fleet.submit(200).ends() == "COMPLETED"  # many: one that took long by chance is soon outweighed
    before = len(postgres_fleet.notes("begun"))
    job, gate = postgres_fleet.gated(6, polite=False)
    wait_until(job.events, "some were claimed that there was no slot for, and were given back")
    job.wait_for_counts(CLAIMED=2, PENDING=4)
    assert set(job.events()) == {"released"}
    postgres_fleet.start("second", executor=executor, concurrency=4)
    postgres_fleet.wait_for_note("begun", times=before + 6)
    gate.touch()

    assert job.ends() == "COMPLETED"
    assert len(begun_by(postgres_fleet, "second")) == 4
    assert [row.attempt for row in job.partitions().values()] == [1] * 6


@pytest.fixture
def changing(tmp_path: Path) -> Path:
    """A module of steps that a deployment breaks."""
    module = tmp_path / "steps_that_change.py"
    module.write_text(STEPS.read_text())
    return module


BROKEN = "import a_library_that_is_not_here\n"
NO_IMPORT = "a child process cannot import the steps"


def test_a_worker_whose_children_cannot_start_leaves_the_work_to_others(postgres_fleet: Fleet, changing: Path) -> None:
    broken = postgres_fleet.start("broken", imports=changing)
    (child,) = wait_until(broken.children, "it has a child")
    changing.write_text(BROKEN)
    os.kill(child, signal.SIGKILL)
    broken.says(NO_IMPORT)
    job = postgres_fleet.submit(2)
    broken.says(NO_IMPORT, times=broken.log.count(NO_IMPORT) + 2)  # it could have looked for work many times
    assert job.counts() == {"PENDING": 2}
    assert job.events() == []

    postgres_fleet.start("well")
    assert job.ends() == "COMPLETED"
    assert {row.result["node"].split("-")[0] for row in job.partitions().values()} == {"well"}
    changing.write_text(STEPS.read_text())
    assert postgres_fleet.submit(to=broken.node_id, transferable=False).ends() == "COMPLETED"


def test_what_waits_for_a_child_that_cannot_start_is_given_back(postgres_fleet: Fleet, changing: Path) -> None:
    broken = postgres_fleet.start("broken", imports=changing, prefetch=1)
    job, gate = postgres_fleet.gated(2, polite=False)
    job.wait_for_counts(CLAIMED=2)
    begun = postgres_fleet.wait_for_note("begun")
    changing.write_text(BROKEN)
    os.kill(begun.pid, signal.SIGKILL)
    broken.says(NO_IMPORT)
    postgres_fleet.start("well")
    gate.touch()

    assert job.ends() == "FAILED"
    assert job.counts() == {"FAILED": 1, "COMPLETED": 1}
    (other,) = [row for key, row in job.partitions().items() if key != begun.partition_key]
    assert (other.result["node"].split("-")[0], other.attempt) == ("well", 1)
