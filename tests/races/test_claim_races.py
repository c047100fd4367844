"""Races for partitions: who gets them, and that nobody gets one twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from airflow_dbpartition.domain import Claim, JobSettings, Partition, PartitionStatus
from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.races.racing import contestants, errors, race, rounds
from tests.scenarios import (
    QUICK,
    TERMINAL,
    add_node,
    age_partitions,
    claim,
    claim_one,
    complete,
    partition,
    remove,
    statuses,
    submit,
    sweep,
)

CLAIMERS = 8
OFTEN = JobSettings(transferable="always", max_node_losses=100)


@pytest.mark.parametrize("whose", ["nobodys", "stolen"])
def test_eight_claimers_take_each_partition_once(database: Database, repository: JobRepository, whose: str) -> None:
    count = 400 if database.name == "sqlite" else 2000
    names = [f"n{number}" for number in range(CLAIMERS)]
    for name in names:
        add_node(repository, name)
    for number in rounds(2 if whose == "nobodys" else 1):
        launched = submit(repository, count, job=f"job {number}", to=None if whose == "nobodys" else "n0")
        age_partitions(repository, 10)

        def take(own: JobRepository, name: str) -> list[Claim]:
            taken: list[Claim] = []
            empty = 0
            while empty < 3:
                some = claim(own, name, 7, steal_after_s=0)
                empty = 0 if some else empty + 1
                taken += some
            return taken

        with contestants(database, CLAIMERS) as owns:
            outcomes = race(*(lambda o=own, n=name: take(o, n) for own, name in zip(owns, names, strict=True)))
        assert errors(outcomes) == []
        taken = [one for outcome in outcomes if isinstance(outcome, list) for one in outcome]
        assert Counter(Counter(one.step_execution_id for one in taken).values()) == {1: count}
        rows = {row.step_execution_id: row for row in repository.reading.partitions(launched.job_execution_id)}
        assert all(rows[one.step_execution_id].assigned_node == one.node_id for one in taken)
        assert {row.version for row in rows.values()} == {1}


def test_a_claim_and_a_stop_leave_no_claim_unseen_and_no_stray(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 2) as (claimer, stopper):
        for number in rounds(30, database):
            launched = submit(repository, 6, job=f"job {number}")
            outcomes = race(
                lambda: claim(claimer, limit=3),
                lambda launched=launched: stopper.executions.stop(launched.job_execution_id, reason="enough"),
            )
            assert errors(outcomes) == []
            taken = outcomes[0]
            assert isinstance(taken, list)
            expected = {"CLAIMED": len(taken), "STOPPED": 6 - len(taken)}
            assert statuses(repository, launched.job_execution_id) == {k: v for k, v in expected.items() if v}
            reply = repository.nodes.heartbeat("a", current_load=0)
            assert reply.stopping == {one.step_execution_id for one in taken}
            for one in taken:
                repository.settlements.stop(one)
            assert str(repository.executions.finalise(launched.job_execution_id)) == "STOPPED"


SETTLES: dict[str, Callable[[JobRepository, Claim], None]] = {
    "complete": lambda repository, taken: complete(repository, taken),
    "fail": lambda repository, taken: repository.settlements.fail(taken, message="boom"),
    "retry": lambda repository, taken: repository.settlements.retry(taken, message="boom", delay_s=0),
    "release": lambda repository, taken: repository.settlements.release(taken, message="leaving"),
}


@pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)
def test_a_stop_and_a_settle_end_the_execution_and_leave_nothing_pending(
    database: Database, repository: JobRepository, settle: Callable[[JobRepository, Claim], None]
) -> None:
    add_node(repository)
    with contestants(database, 2) as (settler, stopper):
        for number in rounds(20, database):
            launched = submit(repository, 2, job=f"job {number}", settings=OFTEN)
            job_execution_id = launched.job_execution_id
            taken = claim_one(repository)

            def settle_and_end(taken: Claim = taken, job_execution_id: int = job_execution_id) -> object:
                settle(settler, taken)
                return settler.executions.finalise(job_execution_id)

            outcomes = race(
                settle_and_end,
                lambda job_execution_id=job_execution_id: stopper.executions.stop(job_execution_id, reason="enough"),
            )
            assert errors(outcomes) == []
            assert set(statuses(repository, job_execution_id)) <= TERMINAL
            assert not repository.reading.execution(job_execution_id).status.is_active
            assert claim(repository, limit=9) == []


def test_a_sweep_and_a_settle_agree_on_who_had_it(database: Database, repository: JobRepository) -> None:
    """Either the settle counts and the work is over, or it is lost and somebody else's: never both."""
    add_node(repository, "heir")
    with contestants(database, 2) as (settler, sweeper):
        for number in rounds(25, database):
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 1, job=f"job {number}", to=name, settings=OFTEN)
            taken = claim_one(repository, name)
            remove(repository, name)
            outcomes = race(
                lambda taken=taken: complete(settler, taken),
                lambda: Recovery(sweeper, QUICK).sweep(may_judge=True) and None,
            )
            assert errors(outcomes, ClaimLostError) == []
            row = partition(repository, launched.job_execution_id)
            if outcomes[0] is None:
                assert row.status is PartitionStatus.COMPLETED
            else:
                assert isinstance(outcomes[0], ClaimLostError)
                assert (row.status, row.assigned_node, row.node_losses) == (PartitionStatus.PENDING, "heir", 1)
                complete(repository, claim_one(repository, "heir"))
            sweep(repository)


def test_a_zombie_never_settles_what_its_own_node_claimed_again(database: Database, repository: JobRepository) -> None:
    """A → B → A on the same row, the first claim's late settle racing that of the last."""
    n = repository.tables.nodes
    with contestants(database, 2) as (zombie, living):
        for number in rounds(20, database):
            launched = submit(repository, 1, job=f"job {number}", settings=OFTEN)
            stale = None
            for name in ("A", "B", "A"):
                with repository.engine.begin() as connection:
                    connection.execute(n.delete())
                add_node(repository, name)
                current = claim_one(repository, name)
                stale = stale or current
                if name != "A" or current is stale:
                    remove(repository, name)
                    sweep(repository)
            assert stale is not None
            outcomes = race(
                lambda stale=stale: complete(zombie, stale, result="stale"),
                lambda current=current: complete(living, current, result="current"),
            )
            assert isinstance(outcomes[0], ClaimLostError)
            assert outcomes[1] is None
            assert partition(repository, launched.job_execution_id).result == "current"


def test_a_node_that_is_removed_while_it_claims_strands_nothing(database: Database, repository: JobRepository) -> None:
    add_node(repository, "heir")
    with contestants(database, 3) as (claimer, remover, sweeper):
        for number in rounds(25, database):
            name = add_node(repository, f"n{number}")
            launched = submit(repository, [Partition(f"p{i}") for i in range(3)], job=f"job {number}", settings=OFTEN)
            outcomes = race(
                lambda name=name: claim(claimer, name, 2) and None,
                lambda name=name: remove(remover, name),
                lambda: Recovery(sweeper, QUICK).sweep(may_judge=True) and None,
            )
            assert errors(outcomes) == []
            sweep(repository)
            rows = repository.reading.partitions(launched.job_execution_id)
            assert {row.status for row in rows} == {PartitionStatus.PENDING}
            assert {row.assigned_node for row in rows} <= {None, "heir"}
            assert repository.nodes.heartbeat(name, current_load=1).status is None
            repository.executions.stop(launched.job_execution_id, reason="next round")


def test_sweeps_against_each_other_count_each_loss_once(database: Database, repository: JobRepository) -> None:
    add_node(repository, "heir")
    with contestants(database, 4) as owns:
        for number in rounds(12, database):
            name = add_node(repository, f"n{number}")
            launched = submit(repository, 5, job=f"job {number}", to=name, settings=OFTEN)
            claim(repository, name, 3)
            remove(repository, name)
            outcomes = race(*(lambda own=own: Recovery(own, QUICK).sweep(may_judge=True) and None for own in owns))
            assert errors(outcomes) == []
            sweep(repository)
            rows = repository.reading.partitions(launched.job_execution_id)
            assert sorted(row.node_losses for row in rows) == [0, 0, 1, 1, 1]
            assert {(row.status, row.assigned_node) for row in rows} == {(PartitionStatus.PENDING, "heir")}
            repository.executions.stop(launched.job_execution_id, reason="next round")
