"""Races for partitions: who gets them, and that nobody gets one twice."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

from airflow_dbpartition.domain import Claim, Counters, NodeStatus, Partition, PartitionStatus
from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.recovery import Recovery, SweepReport
from airflow_dbpartition.repository import HeartbeatReply, JobRepository
from tests.databases import Database
from tests.races.racing import contestants, errors, race, rounds
from tests.scenarios import (
    OFTEN,
    QUICK,
    TERMINAL,
    add_node,
    age_partitions,
    claim,
    claim_one,
    complete,
    event_names,
    partition,
    remove,
    silence,
    statuses,
    submit,
    sweep,
)

CLAIMERS = 8


def take_until_empty(own: JobRepository, name: str, *, steal_after_s: float | None = None) -> list[tuple[int, str]]:
    """Claim in small lots until three looks in a row find nothing; what was taken, and by whom."""
    taken: list[tuple[int, str]] = []
    empty = 0
    while empty < 3:
        some = claim(own, name, 7, steal_after_s=steal_after_s)
        empty = 0 if some else empty + 1
        taken += [(one.step_execution_id, one.node_id) for one in some]
    return taken


def assert_each_once(
    repository: JobRepository, job_execution_id: int, taken: list[tuple[int, str]], count: int
) -> None:
    assert Counter(Counter(step_id for step_id, _ in taken).values()) == {1: count}
    rows = repository.reading.partitions(job_execution_id)
    assert {row.step_execution_id: row.assigned_node for row in rows} == dict(taken)
    assert {(row.status, row.version, row.attempt) for row in rows} == {(PartitionStatus.CLAIMED, 1, 1)}


@pytest.mark.parametrize("whose", ["nobodys", "stolen"])
def test_eight_claimers_take_each_of_two_thousand_partitions_once(
    database: Database, repository: JobRepository, whose: str
) -> None:
    count = 400 if database.name == "sqlite" else 2000
    names = [add_node(repository, f"n{number}") for number in range(CLAIMERS)]
    steal_after_s = 0 if whose == "stolen" else None
    with contestants(database, CLAIMERS) as owns:
        for number in rounds(2 if whose == "nobodys" else 1):
            to = None if whose == "nobodys" else "busy"
            launched = submit(repository, count, job=f"job {number}", to=to)
            age_partitions(repository, 10)
            outcomes = race(
                *(
                    partial(take_until_empty, own, name, steal_after_s=steal_after_s)
                    for own, name in zip(owns, names, strict=True)
                )
            )
            assert errors(outcomes) == []
            taken = [one for outcome in outcomes for one in outcome]
            assert_each_once(repository, launched.job_execution_id, taken, count)
            if whose == "stolen":
                assert event_names(repository, launched.job_execution_id) == ["stolen"] * min(count, 1000)


def _take_in_process(database: Database, name: str) -> list[tuple[int, str]]:
    own = JobRepository.connect(database.config(pool_size=1))
    try:
        return take_until_empty(own, name)
    finally:
        own.close()


@pytest.mark.slow
def test_claimers_in_processes_of_their_own_take_each_partition_once(
    database: Database, repository: JobRepository
) -> None:
    names = [add_node(repository, f"n{number}") for number in range(3)]
    launched = submit(repository, 1000)
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(partial(_take_in_process, database), names, timeout=120))
    assert_each_once(repository, launched.job_execution_id, [one for some in outcomes for one in some], 1000)


def test_a_claim_that_is_not_committed_hides_nothing_but_what_it_takes(
    database: Database, repository: JobRepository
) -> None:
    """A claim that locks every row it looks at leaves the others with nothing: they would work in turns."""
    if database.name == "sqlite":
        pytest.skip("SQLite has one writer")
    for name in "ab":
        add_node(repository, name)
    submit(repository, 20)
    about_to_commit, go_on = threading.Event(), threading.Event()
    with contestants(database, 1) as (slow,), ThreadPoolExecutor(1) as pool:

        @event.listens_for(slow.engine, "commit")
        def hesitate(_connection: object) -> None:
            about_to_commit.set()
            go_on.wait(60)

        pending = pool.submit(claim, slow, "a", 3)
        try:
            assert about_to_commit.wait(60)
            others = claim(repository, "b", 17)
        finally:
            go_on.set()
        assert len(others) == 17
        assert {one.partition_key for one in pending.result()} == {"p0", "p1", "p2"}


def test_a_thief_and_the_owner_get_each_partition_once(database: Database, repository: JobRepository) -> None:
    for name in ("owner", "thief"):
        add_node(repository, name)
    with contestants(database, 2) as (owner, thief):
        for number in rounds(40, database):
            launched = submit(repository, 4, job=f"job {number}", to="owner")
            age_partitions(repository, 10)
            outcomes = race(
                partial(claim, owner, "owner", 3),
                partial(claim, thief, "thief", 3, steal_after_s=0),
            )
            assert errors(outcomes) == []
            taken = [one for outcome in outcomes for one in outcome]
            assert Counter(Counter(one.step_execution_id for one in taken).values()) == {1: len(taken)}
            rows = {row.step_execution_id: row for row in repository.reading.partitions(launched.job_execution_id)}
            for one in taken:
                row = rows[one.step_execution_id]
                assert (row.assigned_node, row.version) == (one.node_id, one.version)
                complete(repository, one)
            stolen = [one for one in taken if one.stolen_from]
            assert {one.node_id for one in stolen} <= {"thief"}
            assert event_names(repository, launched.job_execution_id) == ["stolen"] * len(stolen)
            for one in claim(repository, "owner", 9):
                complete(repository, one)
            assert statuses(repository, launched.job_execution_id) == {"COMPLETED": 4}


def test_a_claim_and_a_stop_leave_no_claim_unseen_and_no_stray(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 2) as (claimer, stopper):
        for number in rounds(50, database):
            job_execution_id = submit(repository, 6, job=f"job {number}").job_execution_id
            outcomes = race(
                partial(claim, claimer, limit=3),
                partial(stopper.executions.stop, job_execution_id, reason="enough"),
            )
            assert errors(outcomes) == []
            taken: list[Claim] = outcomes[0]
            expected = {"CLAIMED": len(taken), "STOPPED": 6 - len(taken)}
            assert statuses(repository, job_execution_id) == {k: v for k, v in expected.items() if v}
            reply = repository.nodes.heartbeat("a", current_load=0)
            assert reply.stopping == {one.step_execution_id for one in taken}
            for one in taken:
                repository.settlements.stop(one)
            assert str(repository.executions.finalise(job_execution_id)) == "STOPPED"


Settle = Callable[[JobRepository, Claim], Any]

SETTLES: dict[str, Settle] = {
    "complete": lambda repository, taken: complete(repository, taken, result="stale"),
    "fail": lambda repository, taken: repository.settlements.fail(taken, message="boom"),
    "retry": lambda repository, taken: repository.settlements.retry(taken, message="boom", delay_s=0),
    "release": lambda repository, taken: repository.settlements.release(taken, message="leaving"),
    "stop": lambda repository, taken: repository.settlements.stop(taken),
}


def write_checkpoint(repository: JobRepository, taken: Claim, value: str = "stale") -> None:
    with repository.engine.begin() as connection:
        repository.settlements.checkpoint(connection, taken, checkpoint={"by": value}, counters=Counters())


@pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)
def test_a_stop_and_a_settle_end_the_execution_and_leave_nothing_pending(
    database: Database, repository: JobRepository, settle: Settle
) -> None:
    add_node(repository)

    def settle_and_end(own: JobRepository, taken: Claim) -> None:
        settle(own, taken)
        own.executions.finalise(taken.job_execution_id)

    with contestants(database, 2) as (settler, stopper):
        for number in rounds(30, database):
            job_execution_id = submit(repository, 2, job=f"job {number}", settings=OFTEN).job_execution_id
            outcomes = race(
                partial(settle_and_end, settler, claim_one(repository)),
                partial(stopper.executions.stop, job_execution_id, reason="enough"),
            )
            assert errors(outcomes) == []
            assert set(statuses(repository, job_execution_id)) <= TERMINAL
            assert not repository.reading.execution(job_execution_id).status.is_active
            assert claim(repository, limit=9) == []


@pytest.mark.parametrize("verb", ["retry", "release"])
def test_a_stop_and_a_return_to_pending_leave_nothing_pending(
    database: Database, repository: JobRepository, verb: str
) -> None:
    """The owner dies right after: nobody finalises, and nothing may be left for somebody to find."""
    add_node(repository)
    with contestants(database, 2) as (settler, stopper):
        for number in rounds(40, database):
            job_execution_id = submit(repository, 1, job=f"job {number}", settings=OFTEN).job_execution_id
            outcomes = race(
                partial(SETTLES[verb], settler, claim_one(repository)),
                partial(stopper.executions.stop, job_execution_id, reason="enough"),
            )
            assert errors(outcomes) == []
            assert statuses(repository, job_execution_id) == {"STOPPED": 1}


def sweep_as(own: JobRepository) -> SweepReport:
    return Recovery(own, QUICK).sweep(may_judge=True)


@pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)
def test_a_sweep_and_a_settle_agree_on_who_had_it(
    database: Database, repository: JobRepository, settle: Settle
) -> None:
    """Either the settle counts, or the work is lost and somebody else's: never both."""
    add_node(repository, "heir")
    with contestants(database, 2) as (settler, sweeper):
        for number in rounds(20, database):
            repository.nodes.heartbeat("heir", current_load=0)  # a busy machine takes long for some rounds
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 1, job=f"job {number}", to=name, settings=OFTEN)
            taken = claim_one(repository, name)
            remove(repository, name)
            outcomes = race(partial(settle, settler, taken), partial(sweep_as, sweeper))
            assert errors(outcomes, ClaimLostError) == []
            events = event_names(repository, launched.job_execution_id)
            if isinstance(outcomes[0], ClaimLostError):
                row = partition(repository, launched.job_execution_id)
                assert (row.status, row.assigned_node, row.node_losses) == (PartitionStatus.PENDING, "heir", 1)
                assert events == ["lost", "reassigned"]
            else:
                assert "lost" not in events
            sweep(repository)
            row = partition(repository, launched.job_execution_id)
            if row.status is PartitionStatus.PENDING:
                assert row.assigned_node in (None, "heir")
                complete(repository, claim_one(repository, "heir"))
            repository.executions.finalise(launched.job_execution_id)
            assert not repository.reading.execution(launched.job_execution_id).status.is_active


@pytest.mark.parametrize("late", [*SETTLES.values(), write_checkpoint], ids=[*SETTLES, "checkpoint"])
def test_a_zombie_never_settles_what_its_own_node_claimed_again(
    database: Database, repository: JobRepository, late: Settle
) -> None:
    """A → B → A on the same row, the first claim's late write racing those of the last."""
    n = repository.tables.nodes

    def checkpoint_and_complete(own: JobRepository, current: Claim) -> None:
        write_checkpoint(own, current, "current")
        complete(own, current, result="current")

    with contestants(database, 2) as (zombie, living):
        for number in rounds(10, database):
            launched = submit(repository, 1, job=f"job {number}", settings=OFTEN)
            claims: list[Claim] = []
            for name in "ABA":
                if claims:
                    remove(repository, claims[-1].node_id)
                    sweep(repository)
                with repository.engine.begin() as connection:
                    connection.execute(n.delete())
                add_node(repository, name)
                claims.append(claim_one(repository, name))
            stale, _, current = claims
            assert (stale.node_id, stale.step_execution_id) == (current.node_id, current.step_execution_id)
            outcomes = race(partial(late, zombie, stale), partial(checkpoint_and_complete, living, current))
            assert isinstance(outcomes[0], ClaimLostError)
            assert outcomes[1] is None
            row = partition(repository, launched.job_execution_id)
            assert (row.status, row.result, row.checkpoint) == (
                PartitionStatus.COMPLETED,
                "current",
                {"by": "current"},
            )


def test_a_node_that_is_removed_while_it_claims_strands_nothing(database: Database, repository: JobRepository) -> None:
    """A claim that was under way may still commit under the removed node's name: the next sweep must find it."""
    add_node(repository, "heir")
    with contestants(database, 3) as (claimer, remover, sweeper):
        for number in rounds(40, database):
            repository.nodes.heartbeat("heir", current_load=0)  # a busy machine takes long for some rounds
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 3, job=f"job {number}", settings=OFTEN)
            outcomes = race(
                partial(claim, claimer, name, 2),
                partial(remove, remover, name),
                partial(sweep_as, sweeper),
            )
            assert errors(outcomes) == []
            assert repository.nodes.heartbeat(name, current_load=1).status is None, "removed is removed"
            sweep(repository)
            rows = repository.reading.partitions(launched.job_execution_id)
            assert {row.status for row in rows} == {PartitionStatus.PENDING}
            assert {row.assigned_node for row in rows} <= {None, "heir"}
            repository.executions.stop(launched.job_execution_id, reason="next round")


def test_who_leaves_while_its_heart_still_beats_is_removed(database: Database, repository: JobRepository) -> None:
    """A heartbeat under way holds the node's row; leaving must wait for it, and not pass over it."""
    with contestants(database, 2) as (heart, leaver):
        for number in rounds(40, database):
            name = add_node(repository, f"n{number}")
            outcomes = race(
                partial(heart.nodes.heartbeat, name, current_load=0), partial(leaver.losses.deregister, name)
            )
            assert errors(outcomes) == []
            assert repository.nodes.heartbeat(name, current_load=0).status is None


def test_a_late_heartbeat_saves_the_node_or_learns_that_it_is_removed(
    database: Database, repository: JobRepository
) -> None:
    add_node(repository, "heir")
    with contestants(database, 2) as (heart, sweeper):
        for number in rounds(40, database):
            repository.nodes.heartbeat("heir", current_load=0)  # a busy machine takes long for some rounds
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 1, job=f"job {number}", to=name, settings=OFTEN)
            taken = claim_one(repository, name)
            silence(repository, name, 40)
            outcomes = race(partial(heart.nodes.heartbeat, name, current_load=1), partial(sweep_as, sweeper))
            assert errors(outcomes) == []
            reply: HeartbeatReply = outcomes[0]
            if reply.status is None:
                sweep(repository)
                assert partition(repository, launched.job_execution_id).assigned_node == "heir"
                with pytest.raises(ClaimLostError):
                    complete(repository, taken)
            else:
                assert reply.held == {taken.step_execution_id: taken.version}
                found = {node.node_id: node.status for node in repository.nodes.all(include_removed=True)}
                assert found[name] in (NodeStatus.ACTIVE, NodeStatus.UNREACHABLE)
                complete(repository, taken)
            remove(repository, name)
            repository.executions.stop(launched.job_execution_id, reason="next round")


def test_sweeps_against_each_other_count_each_loss_once(database: Database, repository: JobRepository) -> None:
    add_node(repository, "heir")
    with contestants(database, 4) as owns:
        for number in rounds(15, database):
            repository.nodes.heartbeat("heir", current_load=0)  # a busy machine takes long for some rounds
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 5, job=f"job {number}", to=name, settings=OFTEN)
            claim(repository, name, 3)
            remove(repository, name)
            outcomes = race(*(partial(sweep_as, own) for own in owns))
            assert errors(outcomes) == []
            sweep(repository)
            rows = repository.reading.partitions(launched.job_execution_id)
            assert sorted(row.node_losses for row in rows) == [0, 0, 1, 1, 1]
            assert {(row.status, row.assigned_node) for row in rows} == {(PartitionStatus.PENDING, "heir")}
            assert Counter(event_names(repository, launched.job_execution_id)) == {"lost": 3, "reassigned": 5}
            repository.executions.stop(launched.job_execution_id, reason="next round")


def test_work_of_fixed_owners_is_failed_once_by_any_number_of_sweeps(
    database: Database, repository: JobRepository
) -> None:
    with contestants(database, 4) as owns:
        for number in rounds(15, database):
            name = add_node(repository, f"n{number}")
            planned = [Partition(f"p{at}", transferable=False) for at in range(3)]
            launched = submit(repository, planned, job=f"job {number}", to=name)
            claim(repository, name, 2)
            remove(repository, name)
            outcomes = race(*(partial(sweep_as, own) for own in owns))
            assert errors(outcomes) == []
            sweep(repository)
            assert statuses(repository, launched.job_execution_id) == {"FAILED": 3}
            assert Counter(event_names(repository, launched.job_execution_id)) == {"lost": 2, "failed": 3}
            assert str(repository.reading.execution(launched.job_execution_id).status) == "FAILED"
