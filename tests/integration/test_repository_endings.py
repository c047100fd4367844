"""How an execution ends: the verdict, stopping, fail_fast, abandoning."""

from __future__ import annotations

import pytest

from airflow_dbpartition.domain import ExecutionStatus, JobSettings, PartitionStatus
from airflow_dbpartition.errors import (
    JobAbandonedError,
    JobAlreadyCompleteError,
    JobExecutionNotFoundError,
    JobExecutionRunningError,
    OwnershipLostError,
)
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from tests.scenarios import (
    QUICK,
    add_node,
    claim,
    claim_one,
    column,
    complete,
    event_names,
    fail_all,
    finish_all,
    partition,
    statuses,
    submit,
    sweep,
)


def execution_status(repository: JobRepository, job_execution_id: int) -> ExecutionStatus:
    return repository.reading.execution(job_execution_id).status


def test_an_execution_ends_only_when_nothing_is_left(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    first, second = claim(repository, limit=2)
    assert repository.executions.finalise(launched.job_execution_id) is None
    complete(repository, first)
    assert repository.executions.finalise(launched.job_execution_id) is None
    complete(repository, second)
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.COMPLETED
    ended = repository.reading.execution(launched.job_execution_id)
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.COMPLETED
    assert repository.reading.execution(launched.job_execution_id) == ended


def test_one_failed_partition_fails_the_execution_and_is_named(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 3)
    one, two, three = claim(repository, limit=3)
    complete(repository, one)
    repository.settlements.fail(two, message="Traceback …\nValueError: the cause")
    complete(repository, three)
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.FAILED
    message = repository.reading.execution(launched.job_execution_id).exit_message
    assert message == "1 of 3 partitions failed\np1 on a: ValueError: the cause"
    (failure,) = repository.reading.failures(launched.job_execution_id)
    assert (failure.partition_key, failure.node_id, failure.attempt) == ("p1", "a", 1)


def test_ten_thousand_failures_make_a_message_that_can_be_read(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 40)
    fail_all(repository, launched.job_execution_id, message="x" * 9000)
    message = repository.reading.execution(launched.job_execution_id).exit_message or ""
    assert message.startswith("40 of 40 partitions failed")
    assert len(message) <= 8000
    assert len(repository.reading.failures(launched.job_execution_id)) == 10


def test_whoever_settled_last_may_die_and_a_sweep_ends_the_execution(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    complete(repository, claim_one(repository))
    assert execution_status(repository, launched.job_execution_id).is_active
    assert sweep(repository).finalised == {launched.job_execution_id: ExecutionStatus.COMPLETED}
    assert sweep(repository).finalised == {}


def test_finalising_what_does_not_exist_says_so(repository: JobRepository) -> None:
    for verb in (
        repository.executions.finalise,
        repository.executions.abandon,
        repository.reading.execution,
        repository.reading.summary,
        lambda number: repository.executions.stop(number, reason="x"),
        lambda number: repository.executions.attach(number, owner_token="x"),
        lambda number: repository.executions.restart(number, place=lambda work: {}),
    ):
        with pytest.raises(JobExecutionNotFoundError, match="there is no job execution 4711"):
            verb(4711)


# --- stopping ----------------------------------------------------------------------------------------------------


def test_stopping_ends_the_pending_at_once_and_the_claimed_by_their_owners(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 5)
    done, running, finishing = claim(repository, limit=3)
    complete(repository, done)
    assert repository.executions.stop(launched.job_execution_id, reason="marked failed") is ExecutionStatus.STOPPING
    assert statuses(repository, launched.job_execution_id) == {"COMPLETED": 1, "CLAIMED": 2, "STOPPED": 2}
    repository.settlements.stop(running)
    assert repository.executions.finalise(launched.job_execution_id) is None
    complete(repository, finishing)
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.STOPPED
    assert repository.reading.execution(launched.job_execution_id).exit_message == "marked failed"
    assert event_names(repository, launched.job_execution_id) == ["stopped"] * 3


def test_stopping_with_nothing_claimed_stops_at_once(repository: JobRepository) -> None:
    launched = submit(repository, 2)
    assert repository.executions.stop(launched.job_execution_id, reason="enough") is ExecutionStatus.STOPPED
    assert repository.executions.stop(launched.job_execution_id, reason="again") is ExecutionStatus.STOPPED
    assert repository.reading.execution(launched.job_execution_id).exit_message == "enough"


def test_stopping_twice_keeps_the_first_reason(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    claim_one(repository)
    for reason in ("first", "second"):
        assert repository.executions.stop(launched.job_execution_id, reason=reason) is ExecutionStatus.STOPPING
    assert repository.reading.execution(launched.job_execution_id).exit_message == "first"


def test_a_stop_that_comes_too_late_changes_nothing(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    finish_all(repository, launched.job_execution_id)
    before = repository.reading.execution(launched.job_execution_id)
    assert repository.executions.stop(launched.job_execution_id, reason="late") is ExecutionStatus.COMPLETED
    assert repository.reading.execution(launched.job_execution_id) == before


def test_all_that_was_running_completed_although_asked_to_stop_is_completed(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    taken = claim_one(repository)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    complete(repository, taken)
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.COMPLETED


@pytest.mark.parametrize("verb", ["retry", "release"])
def test_what_would_go_back_to_pending_in_a_stopping_execution_is_stopped(repository: JobRepository, verb: str) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=JobSettings(transferable="always", partition_retries=3))
    taken = claim_one(repository)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    for _ in range(2):
        if verb == "retry":
            repository.settlements.retry(taken, message="boom", delay_s=0)
        else:
            repository.settlements.release(taken, message="leaving")
    assert partition(repository, launched.job_execution_id).status is PartitionStatus.STOPPED
    assert repository.executions.finalise(launched.job_execution_id) is ExecutionStatus.STOPPED
    assert event_names(repository, launched.job_execution_id) == ["stopped"]


def test_a_pending_stray_in_a_stopping_execution_is_swept_up(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    taken = claim_one(repository)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    p = repository.tables.partitions
    with repository.engine.begin() as connection:
        stray = p.c.step_execution_id == taken.step_execution_id
        connection.execute(p.update().where(stray).values(status="PENDING"))
    assert sweep(repository).finalised == {launched.job_execution_id: ExecutionStatus.STOPPED}


def test_only_the_owner_or_a_person_stops(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1, owner_token="first try")
    claim_one(repository)
    repository.executions.attach(launched.job_execution_id, owner_token="second try")
    with pytest.raises(OwnershipLostError):
        repository.executions.stop(launched.job_execution_id, owner_token="first try", reason="on_kill")
    assert repository.executions.stop(launched.job_execution_id, reason="a person") is ExecutionStatus.STOPPING


# --- fail_fast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_stops_the_others_and_is_still_a_failure(repository: JobRepository, fail_fast: bool) -> None:
    add_node(repository)
    launched = submit(repository, 4, settings=JobSettings(fail_fast=fail_fast))
    failing, running = claim(repository, limit=2)
    repository.settlements.fail(failing, message="boom")
    status = Recovery(repository, QUICK).after_failure(launched.job_execution_id)
    if not fail_fast:
        assert status is None
        assert statuses(repository, launched.job_execution_id) == {"FAILED": 1, "CLAIMED": 1, "PENDING": 2}
        return
    assert status is ExecutionStatus.STOPPING
    repository.settlements.stop(running)
    assert Recovery(repository, QUICK).after_failure(launched.job_execution_id) is ExecutionStatus.FAILED
    assert statuses(repository, launched.job_execution_id) == {"FAILED": 1, "STOPPED": 3}


# --- abandoning --------------------------------------------------------------------------------------------------


def test_only_what_has_ended_badly_can_be_abandoned_and_then_never_restarts(repository: JobRepository) -> None:
    add_node(repository)
    failed = submit(repository, 1, job="failed").job_execution_id
    with pytest.raises(JobExecutionRunningError, match="stop it before"):
        repository.executions.abandon(failed)
    fail_all(repository, failed)
    repository.executions.abandon(failed)
    assert execution_status(repository, failed) is ExecutionStatus.ABANDONED
    repository.executions.abandon(failed)
    with pytest.raises(JobAbandonedError):
        repository.executions.restart(failed, place=lambda work: {})
    assert repository.executions.finalise(failed) is ExecutionStatus.ABANDONED
    completed = submit(repository, 1, job="completed").job_execution_id
    finish_all(repository, completed)
    with pytest.raises(JobAlreadyCompleteError):
        repository.executions.abandon(completed)


def test_a_late_claimer_of_an_ended_execution_gets_nothing(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 2)
    repository.executions.stop(launched.job_execution_id, reason="enough")
    assert claim(repository, limit=9) == []
    assert column(repository, launched.job_execution_id, "attempt") == [0, 0]
