"""Races for executions: begun once, ended once, restarted once, never purged alive."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import func, select

from airflow_dbpartition.domain import Claim, ExecutionStatus, JobSettings
from airflow_dbpartition.errors import JobAlreadyCompleteError, JobExecutionNotFoundError, OwnershipLostError
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository, Launched
from airflow_dbpartition.repository.retention import Purged
from tests.databases import Database
from tests.races.racing import contestants, errors, race, rounds
from tests.scenarios import (
    QUICK,
    TERMINAL,
    add_node,
    claim,
    complete,
    fail_all,
    statuses,
    submit,
    to_nobody,
)


def the_only(outcomes: list[Launched]) -> int:
    """All of them mean the same execution, and exactly one of them made it."""
    assert errors(outcomes) == []
    assert sum(one.created for one in outcomes) == 1
    (job_execution_id,) = {one.job_execution_id for one in outcomes}
    return job_execution_id


@pytest.mark.parametrize("submitters", [2, 20])
def test_any_number_of_submitters_make_one_execution(
    database: Database, repository: JobRepository, submitters: int
) -> None:
    with contestants(database, submitters) as owns:
        for number in rounds(30 if submitters == 2 else 6, database):
            outcomes = race(
                *(
                    partial(submit, own, 5, job=f"job {number}", owner_token=str(token))
                    for token, own in enumerate(owns)
                )
            )
            job_execution_id = the_only(outcomes)
            assert statuses(repository, job_execution_id) == {"PENDING": 5}
            tokens = {str(token) for token in range(submitters)}
            assert repository.reading.execution(job_execution_id).owner_token in tokens


@pytest.mark.parametrize("restarters", [2, 8])
def test_any_number_of_restarters_make_one_execution(
    database: Database, repository: JobRepository, restarters: int
) -> None:
    """Half of them name the latest execution, half one before it."""
    add_node(repository)
    with contestants(database, restarters) as owns:
        for number in rounds(20 if restarters == 2 else 8, database):
            first = submit(repository, 3, job=f"job {number}").job_execution_id
            fail_all(repository, first)
            second = repository.executions.restart(first, place=to_nobody).job_execution_id
            fail_all(repository, second)
            outcomes = race(
                *(
                    partial(own.executions.restart, (first, second)[token % 2], place=to_nobody, owner_token=str(token))
                    for token, own in enumerate(owns)
                )
            )
            job_execution_id = the_only(outcomes)
            assert statuses(repository, job_execution_id) == {"PENDING": 3}
            repository.executions.stop(job_execution_id, reason="next round")


@pytest.mark.parametrize("settlers", [2, 8])
@pytest.mark.parametrize("verdict", [ExecutionStatus.COMPLETED, ExecutionStatus.FAILED], ids=str)
def test_the_last_settlers_end_the_execution_once_and_rightly(
    database: Database, repository: JobRepository, settlers: int, verdict: ExecutionStatus
) -> None:
    """Each settles and then finalises, as workers do: one of them must see that nothing is left."""
    add_node(repository)

    def settle_and_end(own: JobRepository, taken: Claim) -> ExecutionStatus | None:
        if verdict is ExecutionStatus.FAILED and taken.partition_key == "p0":
            own.settlements.fail(taken, message="boom")
        else:
            complete(own, taken, write=2)
        return own.executions.finalise(taken.job_execution_id)

    with contestants(database, settlers) as owns:
        for number in rounds(25 if settlers == 2 else 8, database):
            job_execution_id = submit(repository, settlers, job=f"job {number}").job_execution_id
            taken = claim(repository, limit=settlers)
            outcomes = race(*(partial(settle_and_end, own, one) for own, one in zip(owns, taken, strict=True)))
            assert errors(outcomes) == []
            assert verdict in outcomes, "none of them saw that it was the last"
            assert set(outcomes) <= {None, verdict}
            summary = repository.reading.summary(job_execution_id)
            failed = int(verdict is ExecutionStatus.FAILED)
            assert (summary.status, summary.counts["completed"], summary.counts["failed"]) == (
                verdict,
                settlers - failed,
                failed,
            )
            assert summary.counters["write"] == 2 * (settlers - failed)


def test_twenty_finalisers_write_the_end_once(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 20) as owns:
        for number in rounds(5, database):
            job_execution_id = submit(repository, 1, job=f"job {number}").job_execution_id
            complete(repository, claim(repository)[0])
            outcomes = race(*(partial(own.executions.finalise, job_execution_id) for own in owns))
            assert outcomes == [ExecutionStatus.COMPLETED] * 20
            ended = repository.reading.execution(job_execution_id)
            repository.executions.finalise(job_execution_id)
            assert repository.reading.execution(job_execution_id) == ended


def test_fail_fast_of_several_at_once_stops_the_rest(database: Database, repository: JobRepository) -> None:
    add_node(repository)

    def fail_and_look(own: JobRepository, taken: Claim) -> None:
        own.settlements.fail(taken, message="boom")
        Recovery(own, QUICK).after_failure(taken.job_execution_id)

    with contestants(database, 4) as owns:
        for number in rounds(10, database):
            launched = submit(repository, 8, job=f"job {number}", settings=JobSettings(fail_fast=True))
            taken = claim(repository, limit=4)
            outcomes = race(*(partial(fail_and_look, own, one) for own, one in zip(owns, taken, strict=True)))
            assert errors(outcomes) == []
            assert statuses(repository, launched.job_execution_id) == {"FAILED": 4, "STOPPED": 4}
            assert repository.reading.execution(launched.job_execution_id).status is ExecutionStatus.FAILED


def test_a_new_owner_and_a_stop_of_the_old_one_come_one_after_the_other(
    database: Database, repository: JobRepository
) -> None:
    """A new try may begin before the old one's on_kill runs: the stop is heard before the new owner, or not at all."""
    with contestants(database, 2) as (old, new):
        for number in rounds(30, database):
            job_execution_id = submit(repository, 2, job=f"job {number}", owner_token="old").job_execution_id
            runners = [
                partial(old.executions.stop, job_execution_id, owner_token="old", reason="on_kill"),
                partial(new.executions.attach, job_execution_id, owner_token="new"),
            ]
            outcomes = race(*runners)
            assert errors(outcomes, OwnershipLostError) == []
            execution = repository.reading.execution(job_execution_id)
            if outcomes[1] is ExecutionStatus.STARTING:
                assert isinstance(outcomes[0], OwnershipLostError), "it came after the new owner, and was heard"
            if isinstance(outcomes[0], OwnershipLostError):
                assert (execution.status, execution.owner_token) == (ExecutionStatus.STARTING, "new")
                assert statuses(repository, job_execution_id) == {"PENDING": 2}
            else:
                assert execution.status is ExecutionStatus.STOPPED
                assert statuses(repository, job_execution_id) == {"STOPPED": 2}


def count_rows(repository: JobRepository) -> list[int]:
    """Rows of instances, executions and partitions."""
    tables = repository.tables
    with repository.engine.connect() as connection:
        return [
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (tables.instances, tables.executions, tables.partitions)
        ]


def purge(own: JobRepository) -> Purged:
    """Everything that is over, however young."""
    return own.retention.purge(older_than_s=-1)


def test_a_purge_and_a_restart_never_meet_half_way(database: Database, repository: JobRepository) -> None:
    """Either the history is gone and the restart finds nothing, or it runs and all of the history stays."""
    add_node(repository)
    with contestants(database, 2) as (purger, restarter):
        for number in rounds(50, database):
            old = submit(repository, 3, job=f"job {number}").job_execution_id
            fail_all(repository, old)
            outcomes = race(partial(purge, purger), partial(restarter.executions.restart, old, place=to_nobody))
            assert errors(outcomes, JobExecutionNotFoundError) == []
            purged: Purged = outcomes[0]
            if isinstance(outcomes[1], JobExecutionNotFoundError):
                assert (purged.instances, purged.executions, purged.partitions) == (1, 1, 3)
                assert count_rows(repository) == [0, 0, 0]
            else:
                assert purged.instances == 0
                assert count_rows(repository) == [1, 2, 6]
                repository.executions.stop(outcomes[1].job_execution_id, reason="next round")
                purge(repository)


def test_a_purge_and_a_submit_never_meet_half_way(database: Database, repository: JobRepository) -> None:
    """A submit attaches to what stays, or begins anew where everything is gone."""
    add_node(repository)
    with contestants(database, 2) as (purger, submitter):
        for _ in rounds(50, database):
            old = submit(repository, 2).job_execution_id
            fail_all(repository, old)
            outcomes = race(partial(purge, purger), partial(submit, submitter, 2))
            assert errors(outcomes) == []
            launched: Launched = outcomes[1]
            if launched.created:
                assert count_rows(repository) == [1, 1, 2]
                assert statuses(repository, launched.job_execution_id) == {"PENDING": 2}
                repository.executions.stop(launched.job_execution_id, reason="next round")
            else:
                assert (launched.job_execution_id, launched.status) == (old, ExecutionStatus.FAILED)
            purge(repository)
            assert count_rows(repository) == [0, 0, 0]


def test_two_purges_delete_everything_once(database: Database, repository: JobRepository) -> None:
    with contestants(database, 2) as owns:
        for _ in rounds(10, database):
            for number in range(5):
                submitted = submit(repository, 2, job=f"job {number}")
                repository.executions.stop(submitted.job_execution_id, reason="enough")
            outcomes = race(*(partial(purge, own) for own in owns))
            assert errors(outcomes) == []
            assert sum(one.instances for one in outcomes) == 5
            assert sum(one.partitions for one in outcomes) == 10
            assert count_rows(repository) == [0, 0, 0]


def test_stops_and_restarts_leave_at_most_one_active(database: Database, repository: JobRepository) -> None:
    with contestants(database, 4) as owns:
        old = submit(repository, 2).job_execution_id
        for _ in rounds(15, database):
            outcomes = race(
                *(
                    partial(own.executions.restart, old, place=to_nobody)
                    if at % 2
                    else partial(own.executions.stop, old, reason="enough")
                    for at, own in enumerate(owns)
                )
            )
            assert errors(outcomes, JobAlreadyCompleteError) == []
            executions = repository.reading.recent(limit=1000)
            active = [one for one in executions if one.status.is_active]
            assert len(active) <= 1
            for one in executions:
                if one.job_execution_id not in {other.job_execution_id for other in active}:
                    assert set(statuses(repository, one.job_execution_id)) <= TERMINAL
            for one in active:
                repository.executions.stop(one.job_execution_id, reason="next round")
