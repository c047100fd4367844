"""Frozen workers, and workers that the database does not hear: no work runs twice at once, and all of it goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text

from tests.worker.processes import CALM, QUICK, Fleet, Node, is_alive, wait_until
from tests.worker.proxy import HEARTBEAT, Proxy


@pytest.fixture
def proxy(postgres_fleet: Fleet) -> Iterator[Proxy]:
    with Proxy(postgres_fleet.database.url) as proxy:
        yield proxy


def statuses(node: Node) -> list[str]:
    return sorted(view.status.value for view in node.views())


def test_children_of_a_frozen_worker_end_before_another_takes_their_work(quick_fleet: Fleet) -> None:
    frozen = quick_fleet.start("frozen", concurrency=2)
    movable, gate = quick_fleet.gated(polite=False, transferable=True)
    fixed, fixed_gate = quick_fleet.gated(polite=False, transferable=False)
    first = [quick_fleet.wait_for_note("begun", times=times) for times in (1, 2)]
    quick_fleet.start("heir")
    frozen.send(signal.SIGSTOP)

    heir = quick_fleet.wait_for_note("begun", times=3)
    assert not any(is_alive(note.pid) for note in first)
    assert heir.node_id.startswith("heir-")
    assert fixed.ends() == "FAILED"

    frozen.send(signal.SIGCONT)
    wait_until(lambda: statuses(frozen) == ["ACTIVE", "REMOVED"], "it has begun a new life", logs=[frozen.log_path])
    gate.touch()
    fixed_gate.touch()
    assert movable.ends() == "COMPLETED"
    assert movable.partition().result["node"] == heir.node_id
    assert movable.events() == ["lost", "reassigned"]
    assert fixed.events() == ["lost", "failed"]
    (new_life,) = [view.node_id for view in frozen.views(include_removed=False)]
    assert quick_fleet.submit(to=new_life, transferable=False).ends() == "COMPLETED"


def test_threads_of_a_frozen_worker_commit_nothing_when_it_is_thawed(quick_fleet: Fleet) -> None:
    frozen = quick_fleet.start("frozen", executor="thread")
    job, gate = quick_fleet.gated(do="count", polite=False, transferable=True)
    quick_fleet.wait_for_note("committed-3")
    quick_fleet.start("heir")
    frozen.send(signal.SIGSTOP)

    assert job.ends() == "COMPLETED"  # the heir goes on after the third
    gate.touch()
    frozen.send(signal.SIGCONT)
    assert frozen.exits() == 75  # threads cannot be killed
    assert [note.what for note in quick_fleet.notes() if "committed" in note.what] == [
        f"committed-{number}" for number in range(1, 7)
    ]
    row = job.partition()
    assert (row.counters.write, row.counters.commit) == (6, 6)


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_work_of_a_worker_that_loses_its_database_is_killed_before_another_takes_it(
    postgres_fleet: Fleet, proxy: Proxy, how: str
) -> None:
    lonely = postgres_fleet.start("lonely", url=proxy.url, timings=QUICK)
    job, gate = postgres_fleet.gated(polite=False, transferable=True)
    first = postgres_fleet.wait_for_note("begun")
    postgres_fleet.start("heir", timings=QUICK)
    if how == "frozen":
        proxy.freeze()
    else:
        proxy.cut()

    heir = postgres_fleet.wait_for_note("begun", times=2)
    assert not is_alive(first.pid)
    assert heir.node_id.startswith("heir-")
    assert lonely.process.exit_code is None

    proxy.restore()
    wait_until(lambda: statuses(lonely) == ["ACTIVE", "REMOVED"], "it has begun a new life", logs=[lonely.log_path])
    gate.touch()
    assert job.ends() == "COMPLETED"
    assert job.partition().result["node"] == heir.node_id
    (new_life,) = [view.node_id for view in lonely.views(include_removed=False)]
    assert postgres_fleet.submit(to=new_life, transferable=False).ends() == "COMPLETED"


def test_after_an_outage_that_everybody_has_had_nobody_is_removed(postgres_fleet: Fleet, proxy: Proxy) -> None:
    timings = replace(QUICK, unreachable_after_s=3, remove_after_s=6)
    nodes = [postgres_fleet.start(name, url=proxy.url, timings=timings) for name in ("left", "right")]
    job, gate = postgres_fleet.gated(2, polite=False, transferable=True)
    pids = [postgres_fleet.wait_for_note("begun", times=times).pid for times in (1, 2)]
    proxy.freeze()

    wait_until(lambda: not any(is_alive(pid) for pid in pids), "both have killed their work")
    ages = "both have been silent for longer than remove_after"
    wait_until(lambda: all(node.views()[0].heartbeat_age_s > timings.remove_after_s + 1 for node in nodes), ages)
    gate.touch()
    proxy.restore()
    assert job.ends() == "COMPLETED"
    assert [statuses(node) for node in nodes] == [["ACTIVE"], ["ACTIVE"]]
    assert set(job.events()) == {"released"}


def test_a_short_outage_harms_nothing(postgres_fleet: Fleet, proxy: Proxy) -> None:
    node = postgres_fleet.start(url=proxy.url)
    job, gate = postgres_fleet.gated(transferable=False)
    begun = postgres_fleet.wait_for_note("begun")
    proxy.cut()
    node.says("heartbeat failed")
    gate.touch()
    postgres_fleet.wait_for_note("ended")
    node.says("settle not written yet")
    assert job.counts() == {"CLAIMED": 1}

    proxy.restore()
    assert job.ends() == "COMPLETED"
    assert job.partition().result["pid"] == begun.pid
    assert job.events() == []


def test_a_worker_whose_heartbeat_is_not_answered_takes_no_new_work(postgres_fleet: Fleet, proxy: Proxy) -> None:
    timings = replace(QUICK, remove_after_s=600)
    node = postgres_fleet.start(url=proxy.url, timings=timings)
    assert postgres_fleet.submit().ends() == "COMPLETED"
    proxy.freeze(HEARTBEAT)
    silent = 2 * timings.unreachable_after_s
    wait_until(lambda: node.views()[0].heartbeat_age_s > silent, "it has been silent for too long")
    job = postgres_fleet.submit()

    wait_until(lambda: node.views()[0].heartbeat_age_s > 2 * silent, "it could have looked for work many times")
    assert job.counts() == {"PENDING": 1}
    proxy.restore()
    assert job.ends() == "COMPLETED"


def test_a_listening_connection_that_the_server_closes_is_made_again(postgres_fleet: Fleet) -> None:
    postgres_fleet.start(timings=replace(CALM, poll_s=300))
    assert postgres_fleet.submit().ends(timeout_s=30) == "COMPLETED"
    for _ in range(2):
        (pid,) = wait_until(partial(heartbeat_backends, postgres_fleet), "somebody listens")
        with postgres_fleet.repository.engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        while_nobody_listens = postgres_fleet.submit()

        assert while_nobody_listens.ends(timeout_s=30) == "COMPLETED"
        assert pid not in heartbeat_backends(postgres_fleet)
        assert postgres_fleet.submit().ends(timeout_s=30) == "COMPLETED"


def test_a_claim_whose_answer_was_lost_is_given_back_and_runs_once(postgres_fleet: Fleet, proxy: Proxy) -> None:
    proxy.lose_answer_to_commit_of(b" status='CLAIMED'")
    job = postgres_fleet.submit(transferable="until_started")
    node = postgres_fleet.start(url=proxy.url)  # whose first claim finds it: one that finds nothing says the same

    assert job.ends() == "COMPLETED"
    assert proxy.answers_lost.is_set()
    assert "claim was answered to nobody" in node.log
    assert job.events() == ["released"]
    assert job.partition().attempt == 1
    assert len(postgres_fleet.notes("begun")) == 1


def test_a_completion_whose_answer_was_lost_is_not_done_again(postgres_fleet: Fleet, proxy: Proxy) -> None:
    node = postgres_fleet.start(url=proxy.url)
    proxy.lose_answer_to_commit_of(b"SET status='COMPLETED'")
    job = postgres_fleet.submit()

    assert job.ends() == "COMPLETED"
    assert proxy.answers_lost.is_set()
    assert job.events() == []
    assert len(postgres_fleet.notes("begun")) == 1
    assert "claim lost" not in node.log


def heartbeat_backends(fleet: Fleet) -> list[int]:
    query = text(
        "SELECT pid FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'dbpartition heartbeat'"
    )
    with fleet.repository.engine.connect() as connection:
        return list(connection.execute(query).scalars())
