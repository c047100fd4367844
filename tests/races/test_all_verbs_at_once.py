"""Everything at once: workers, leavers, sweeps, managers and retention on the same few executions, for deadlocks."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import select

from airflow_dbpartition.domain import Claim, Counters, ExecutionStatus, JobSettings, Partition, TransferPolicy
from airflow_dbpartition.errors import (
    ClaimLostError,
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionNotFoundError,
    JobExecutionRunningError,
    LostPartitionsError,
    OwnershipLostError,
)
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.races.racing import contestants, errors, race, rounds
from tests.scenarios import QUICK, add_node, claim, complete, submit, to_nobody

PARTITIONS = 16
ACTS_OF_A_MANAGER = 30
ACTS_OF_A_WORKER = 60

# What a verb may be answered in the midst of all this; everything else, deadlocks above all, is a fault.
EXPECTED = (
    ClaimLostError,
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionNotFoundError,
    JobExecutionRunningError,
    LostPartitionsError,
    OwnershipLostError,
)


@dataclass
class Worker:
    """A node that claims, settles in every way there is, leaves, and comes back under another name."""

    repository: JobRepository
    dice: random.Random
    node_id: str = ""
    held: list[Claim] = field(default_factory=list)
    taken: list[Claim] = field(default_factory=list)
    completed: list[Claim] = field(default_factory=list)

    def run(self) -> None:
        for _ in range(ACTS_OF_A_WORKER):
            try:
                self.dice.choice(self.acts())()
            except EXPECTED:
                continue

    def acts(self) -> list[Callable[[], Any]]:
        if not self.node_id:
            return [self.come]
        if not self.held:
            return [self.beat, self.sweep, *[self.take] * 6]
        return [self.beat, self.sweep, self.take, *[self.settle] * 10, self.checkpoint, self.leave, self.evict]

    def come(self) -> None:
        self.node_id = add_node(self.repository, f"n{secrets.token_hex(4)}")

    def leave(self) -> None:
        """Some say so, some just die: then others find what they held."""
        node_id, self.node_id, self.held = self.node_id, "", []
        if self.dice.random() < 0.5:
            Recovery(self.repository, QUICK).leave(node_id)
        else:
            self.repository.losses.deregister(node_id)

    def evict(self) -> None:
        """Somebody, mistaken for dead, goes on as if nothing had happened: a zombie, until its heart beats."""
        nodes = self.repository.nodes.all()
        if nodes:
            self.repository.losses.deregister(self.dice.choice(nodes).node_id)

    def beat(self) -> None:
        reply = self.repository.nodes.heartbeat(self.node_id, current_load=len(self.held))
        self.held = [one for one in self.held if reply.held.get(one.step_execution_id) == one.version]
        if reply.status is None:
            self.node_id = ""

    def take(self) -> None:
        steal_after_s = self.dice.choice([None, 0])
        taken = claim(self.repository, self.node_id, self.dice.randint(1, 4), steal_after_s=steal_after_s)
        self.held += taken
        self.taken += taken
        for job_execution_id in {one.job_execution_id for one in taken}:
            self.repository.claims.mark_started(job_execution_id)

    def sweep(self) -> None:
        Recovery(self.repository, QUICK).sweep(may_judge=True, deep=self.dice.random() < 0.2)

    def checkpoint(self) -> None:
        one = self.dice.choice(self.held)
        with self.repository.engine.begin() as connection:
            self.repository.settlements.checkpoint(
                connection, one, checkpoint={"version": one.version}, counters=Counters()
            )

    def settle(self) -> None:
        one = self.held.pop(self.dice.randrange(len(self.held)))
        settlements = self.repository.settlements
        verb = self.dice.choice([*["complete"] * 8, "fail", "retry", "release", "stop"])
        if verb == "complete":
            complete(self.repository, one, write=one.version)
            self.completed.append(one)
        elif verb == "fail":
            settlements.fail(one, message="boom")
        elif verb == "retry":
            settlements.retry(one, message="boom", delay_s=0)
        elif verb == "release" and one.transfer_policy is TransferPolicy.ALWAYS:
            settlements.release(one, message="leaving")
        else:
            settlements.stop(one)
        Recovery(self.repository, QUICK).after_failure(one.job_execution_id)


@dataclass
class Manager:
    """Submits the same few jobs as the other manager, attaches, stops, restarts, abandons and purges."""

    repository: JobRepository
    dice: random.Random
    round: int
    turn: int = 0

    def run(self) -> None:
        for self.turn in range(ACTS_OF_A_MANAGER):
            try:
                self.dice.choice([self.begin, self.begin, self.stop, self.restart, self.restart, self.clean])()
            except EXPECTED:
                continue

    def begin(self) -> int:
        number = self.turn // 4 + self.dice.randrange(2)
        policies = (True, True, "until_started", False)
        planned = [Partition(f"p{at}", transferable=policies[at % 4]) for at in range(PARTITIONS)]
        owners = [None, *(node.node_id for node in self.repository.nodes.all())]
        return submit(
            self.repository,
            planned,
            job=f"job {self.round}.{number}",
            to={one.key: self.dice.choice(owners) for one in planned},
            settings=JobSettings(max_node_losses=4, partition_retries=2, fail_fast=number % 4 == 0),
            owner_token=secrets.token_hex(4),
        ).job_execution_id

    def stop(self) -> None:
        if self.dice.random() < 0.3:
            self.repository.executions.stop(self.begin(), reason="enough")

    def restart(self) -> None:
        self.repository.executions.restart(
            self.begin(), place=to_nobody, include_lost=self.dice.random() < 0.7, owner_token=secrets.token_hex(4)
        )

    def clean(self) -> None:
        self.repository.retention.purge(older_than_s=0.5)
        if self.dice.random() < 0.1:
            self.repository.executions.abandon(self.begin())


def finish(repository: JobRepository) -> None:
    """One last node does what is left, and hands back what nobody alive holds."""
    last = add_node(repository, f"last{secrets.token_hex(4)}")
    for node in repository.nodes.all():
        if node.node_id != last:
            repository.losses.deregister(node.node_id)
    for _ in range(20):
        Recovery(repository, QUICK).sweep(may_judge=True, deep=True)
        while taken := claim(repository, last, 100):
            for one in taken:
                complete(repository, one, write=one.version)
        if not repository.reading.recent(active=True, limit=1):
            return
    pytest.fail(f"never over: {repository.reading.recent(active=True)}")


def assert_all_is_well(repository: JobRepository, workers: Sequence[Worker]) -> None:
    with repository.engine.connect() as connection:
        rows = connection.execute(select(repository.tables.partitions)).all()
        executions = connection.execute(select(repository.tables.executions)).all()
    assert rows, "retention has left something to look at"
    assert {row.status for row in rows} <= {"COMPLETED", "FAILED", "STOPPED"}
    assert all(row.end_time is not None for row in rows)
    counts: dict[int, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row.job_execution_id, Counter())[row.status] += 1
    for execution in executions:
        found = counts[execution.job_execution_id]
        assert execution.active_instance_id is None
        assert execution.end_time is not None
        assert found.total() == execution.partition_count
        verdict = "FAILED" if found["FAILED"] else "STOPPED" if found["STOPPED"] else "COMPLETED"
        assert execution.status in (verdict, ExecutionStatus.ABANDONED.value)
    # Nothing is completed twice in an instance, however often it was restarted...
    done = Counter((row.job_instance_id, row.partition_key) for row in rows if row.status == "COMPLETED")
    assert set(done.values()) <= {1}
    # ...what may not run twice is never begun by two nodes...
    owners: dict[int, set[str]] = {}
    for one in (one for worker in workers for one in worker.taken):
        if one.transfer_policy is not TransferPolicy.ALWAYS:
            owners.setdefault(one.step_execution_id, set()).add(one.node_id)
    assert {len(names) for names in owners.values()} == {1}
    # ...and whoever was told "completed" is who the row names, with what it wrote.
    by_id = {row.step_execution_id: row for row in rows}
    for one in (one for worker in workers for one in worker.completed):
        if one.step_execution_id in by_id:
            row = by_id[one.step_execution_id]
            assert (row.status, row.assigned_node, row.version, row.write_count) == (
                "COMPLETED",
                one.node_id,
                one.version,
                one.version,
            )


def test_all_verbs_at_once_end_in_order_and_without_deadlocks(database: Database, repository: JobRepository) -> None:
    with contestants(database, 8) as owns:
        for number in rounds(4, database):
            workers = [Worker(own, random.Random(f"{number} {at}")) for at, own in enumerate(owns[:6])]
            managers = [Manager(own, random.Random(f"{number} m{at}"), number) for at, own in enumerate(owns[6:])]
            outcomes = race(*(one.run for one in workers), *(one.run for one in managers))
            assert errors(outcomes) == []
            finish(repository)
            assert_all_is_well(repository, workers)
