"""Restarting: what did not complete, from where it was, by the stored plan, once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_dbpartition.domain import Counters, ExecutionStatus, JobSettings, Partition, PartitionStatus
from airflow_dbpartition.errors import (
    JobAlreadyCompleteError,
    LostPartitionsError,
    WaitTimeoutError,
)
from airflow_dbpartition.repository import JobRepository
from tests.scenarios import (
    add_node,
    claim,
    claim_one,
    column,
    complete,
    fail_all,
    finish_all,
    partition,
    remove,
    statuses,
    submit,
    sweep,
    to_nobody,
)


def half_done(repository: JobRepository, **options: Any) -> int:
    """Four partitions: p0 completed, p1 failed after a checkpoint, p2 and p3 stopped before they began."""
    add_node(repository)
    partitions = [
        Partition("p0", {"n": 0}),
        Partition("p1", {"n": 1, "text": "ü"}, weight=9, transferable=True),
        Partition("p2", {"n": 2}, weight=2.5),
        Partition("p3", {"n": 3}, transferable=False),
    ]
    launched = submit(repository, partitions, owner_token="first", priority=4, **options)
    done, failing = claim(repository, limit=2)
    complete(repository, done, result="kept", write=10)
    with repository.engine.begin() as connection:
        repository.settlements.checkpoint(connection, failing, checkpoint={"last": 7}, counters=Counters(write=7))
    repository.settlements.fail(failing, message="boom")
    repository.executions.stop(launched.job_execution_id, reason="enough")
    return launched.job_execution_id


def test_a_restart_runs_what_did_not_complete_by_the_stored_plan(repository: JobRepository) -> None:
    old = half_done(repository)
    launched = repository.executions.restart(old, place=to_nobody, owner_token="second", manager={"try": 2})
    assert launched.created
    assert launched.status is ExecutionStatus.STARTING
    new = launched.job_execution_id
    assert new != old
    rows = repository.reading.partitions(new)
    assert [row.partition_key for row in rows] == ["p1", "p2", "p3"]
    assert [row.context for row in rows] == [{"n": 1, "text": "ü"}, {"n": 2}, {"n": 3}]
    assert [row.weight for row in rows] == [9, 2.5, 1]
    assert [row.checkpoint for row in rows] == [{"last": 7}, None, None]
    assert [row.counters.write for row in rows] == [7, 0, 0]
    assert {row.status for row in rows} == {PartitionStatus.PENDING}
    assert {(row.attempt, row.version, row.node_losses) for row in rows} == {(0, 0, 0)}
    assert column(repository, new, "transfer_policy") == ["always", "until_started", "never"]
    assert column(repository, new, "is_transferable") == [1, 1, 0]
    assert column(repository, new, "priority") == [4, 4, 4]
    execution = repository.reading.execution(new)
    assert (execution.owner_token, execution.manager, execution.partition_count) == ("second", {"try": 2}, 3)
    assert repository.reading.execution(old).status is ExecutionStatus.FAILED, "the past stays as it was"


def test_the_instance_over_its_restarts_is_what_a_summary_says(repository: JobRepository) -> None:
    old = half_done(repository)
    new = repository.executions.restart(old, place=to_nobody).job_execution_id
    for taken in claim(repository, limit=9):
        complete(repository, taken, result=taken.partition_key, write=taken.counters.write + 1)
    repository.executions.finalise(new)
    summary = repository.reading.summary(old)
    assert (summary.job_execution_id, summary.status) == (new, ExecutionStatus.COMPLETED)
    assert summary.counts == {"total": 4, "pending": 0, "claimed": 0, "completed": 4, "failed": 0, "stopped": 0}
    assert summary.counters["write"] == 10 + 8 + 1 + 1
    assert dict(repository.reading.iter_results(old)) == {"p0": "kept", "p1": "p1", "p2": "p2", "p3": "p3"}
    assert repository.reading.latest_of_instance(old).job_execution_id == new


def test_restarts_follow_one_another_and_any_of_them_may_be_named(repository: JobRepository) -> None:
    first = half_done(repository)
    second = repository.executions.restart(first, place=to_nobody).job_execution_id
    fail_all(repository, second)
    third = repository.executions.restart(first, place=to_nobody).job_execution_id
    assert third not in (first, second)
    complete(repository, claim_one(repository))
    fail_all(repository, third)
    fourth = repository.executions.restart(second, place=to_nobody).job_execution_id
    assert len(repository.reading.partitions(fourth)) == 2
    finish_all(repository, fourth)
    with pytest.raises(JobAlreadyCompleteError):
        repository.executions.restart(first, place=to_nobody)
    assert repository.reading.summary(first).counts["completed"] == 4


def test_restarting_what_is_active_attaches_and_takes_ownership(repository: JobRepository) -> None:
    old = half_done(repository)
    first = repository.executions.restart(old, place=to_nobody, owner_token="second")
    second = repository.executions.restart(old, place=to_nobody, owner_token="third")
    assert second.job_execution_id == first.job_execution_id
    assert not second.created
    assert repository.reading.execution(first.job_execution_id).owner_token == "third"


def test_a_restart_that_is_repeated_by_the_same_try_says_created_again(repository: JobRepository) -> None:
    old = half_done(repository)
    first = repository.executions.restart(old, place=to_nobody, owner_token="second")
    assert repository.executions.restart(old, place=to_nobody, owner_token="second") == first


def test_a_restart_is_placed_on_the_nodes_that_live_now(repository: JobRepository) -> None:
    old = half_done(repository)
    new = repository.executions.restart(
        old, place=lambda work: dict(zip((one.key for one in work), ("x", None, "y"), strict=True))
    ).job_execution_id
    assert column(repository, new, "assigned_node") == ["x", None, "y"]


def test_an_execution_that_never_began_is_restarted_whole(repository: JobRepository) -> None:
    launched = submit(repository, 3)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    new = repository.executions.restart(launched.job_execution_id, place=to_nobody).job_execution_id
    assert statuses(repository, new) == {"PENDING": 3}


def test_five_thousand_partitions_are_restarted_in_seconds(repository: JobRepository) -> None:
    launched = submit(repository, 5000)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    began = time.monotonic()
    new = repository.executions.restart(
        launched.job_execution_id, place=lambda work: {one.key: f"n{len(one.key) % 3}" for one in work}
    ).job_execution_id
    assert time.monotonic() - began < 10
    assert None not in column(repository, new, "assigned_node")


# --- lost --------------------------------------------------------------------------------------------------------


def lost(repository: JobRepository) -> int:
    add_node(repository, "gone")
    launched = submit(repository, 2, to="gone")
    claim_one(repository, "gone")
    remove(repository, "gone")
    sweep(repository)
    add_node(repository, "a")
    finish_all(repository, launched.job_execution_id)
    return launched.job_execution_id


def test_what_was_lost_while_it_may_have_run_is_not_run_again_by_itself(repository: JobRepository) -> None:
    old = lost(repository)
    with pytest.raises(LostPartitionsError, match=r"1 partition\(s\).*: p0\..*--include-lost"):
        repository.executions.restart(old, place=to_nobody)
    assert repository.reading.latest_of_instance(old).job_execution_id == old, "nothing was written"


def test_a_person_may_decide_that_the_lost_run_again(repository: JobRepository) -> None:
    old = lost(repository)
    new = repository.executions.restart(old, place=to_nobody, include_lost=True).job_execution_id
    assert [row.partition_key for row in repository.reading.partitions(new)] == ["p0"]
    fail_all(repository, new)
    assert repository.executions.restart(old, place=to_nobody).created, "that one failed, it was not lost"


def test_work_that_fails_in_the_middle_of_an_interrupt_counts_as_lost(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    repository.settlements.fail(claim_one(repository), message="killed at shutdown", lost=True)
    repository.executions.finalise(launched.job_execution_id)
    with pytest.raises(LostPartitionsError):
        repository.executions.restart(launched.job_execution_id, place=to_nobody)


def test_poison_that_may_run_again_is_restarted(repository: JobRepository) -> None:
    add_node(repository, "gone")
    launched = submit(repository, 1, settings=JobSettings(transferable="always", max_node_losses=1))
    claim_one(repository, "gone")
    remove(repository, "gone")
    sweep(repository)
    assert partition(repository, launched.job_execution_id).status is PartitionStatus.FAILED
    assert repository.executions.restart(launched.job_execution_id, place=to_nobody).created


# --- deadlines ---------------------------------------------------------------------------------------------------


def test_a_kept_deadline_stays_the_moment_that_it_was(repository: JobRepository) -> None:
    old = half_done(repository, timeout_s=3600)
    before = repository.reading.execution(old).deadline
    new = repository.executions.restart(old, place=to_nobody, timeout_s=9999, keep_deadline=True).job_execution_id
    assert repository.reading.execution(new).deadline == before


def test_a_deadline_that_has_passed_is_not_reopened(repository: JobRepository) -> None:
    old = half_done(repository, timeout_s=0.001)
    time.sleep(0.02)
    with pytest.raises(WaitTimeoutError):
        repository.executions.restart(old, place=to_nobody, keep_deadline=True)
    new = repository.executions.restart(old, place=to_nobody, timeout_s=60).job_execution_id
    deadline = repository.reading.execution(new).deadline
    assert deadline is not None
    assert not repository.reading.progress([new])[new].deadline_passed
