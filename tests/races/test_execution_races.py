"""Races for executions: begun once, ended once, restarted once, never purged alive."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from airflow_dbpartition.domain import ExecutionStatus
from airflow_dbpartition.errors import JobAlreadyCompleteError, JobExecutionNotFoundError
from airflow_dbpartition.repository import JobRepository, Launched
from tests.databases import Database
from tests.races.racing import contestants, errors, race, rounds
from tests.scenarios import add_node, claim, complete, fail_all, statuses, submit, to_nobody


@pytest.mark.parametrize("submitters", [2, 20])
def test_any_number_of_submitters_make_one_execution(
    database: Database, repository: JobRepository, submitters: int
) -> None:
    with contestants(database, submitters) as owns:
        for number in rounds(20 if submitters == 2 else 5, database):
            outcomes = race(
                *(
                    lambda own=own, token=token, number=number: submit(
                        own, 5, job=f"job {number}", owner_token=str(token)
                    )
                    for token, own in enumerate(owns)
                )
            )
            assert errors(outcomes) == []
            launched = [one for one in outcomes if isinstance(one, Launched)]
            assert len({one.job_execution_id for one in launched}) == 1
            assert sum(one.created for one in launched) == 1
            assert statuses(repository, launched[0].job_execution_id) == {"PENDING": 5}


@pytest.mark.parametrize("restarters", [2, 8])
def test_any_number_of_restarters_make_one_execution(
    database: Database, repository: JobRepository, restarters: int
) -> None:
    """Half of them name the latest execution, half one before it."""
    add_node(repository)
    with contestants(database, restarters) as owns:
        for number in rounds(15 if restarters == 2 else 5, database):
            first = submit(repository, 3, job=f"job {number}").job_execution_id
            fail_all(repository, first)
            second = repository.executions.restart(first, place=to_nobody).job_execution_id
            fail_all(repository, second)
            outcomes = race(
                *(
                    lambda own=own, token=token, named=(first, second)[token % 2]: own.executions.restart(
                        named, place=to_nobody, owner_token=str(token)
                    )
                    for token, own in enumerate(owns)
                )
            )
            assert errors(outcomes) == []
            launched = [one for one in outcomes if isinstance(one, Launched)]
            assert len({one.job_execution_id for one in launched}) == 1
            assert sum(one.created for one in launched) == 1
            assert statuses(repository, launched[0].job_execution_id) == {"PENDING": 3}
            repository.executions.stop(launched[0].job_execution_id, reason="next round")


def test_two_last_settlers_end_the_execution_exactly_once(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 2) as owns:
        for number in rounds(40, database):
            job_execution_id = submit(repository, 2, job=f"job {number}").job_execution_id
            taken = claim(repository, limit=2)

            def settle_and_end(own: JobRepository, position: int, taken=taken, job=job_execution_id) -> object:  # type: ignore[no-untyped-def]
                complete(own, taken[position])
                return own.executions.finalise(job)

            outcomes = race(*(lambda own=own, at=at: settle_and_end(own, at) for at, own in enumerate(owns)))
            assert errors(outcomes) == []
            assert ExecutionStatus.COMPLETED in outcomes, "neither saw that it was the last"
            assert repository.reading.execution(job_execution_id).status is ExecutionStatus.COMPLETED


def test_twenty_finalisers_write_the_end_once(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 20) as owns:
        for number in rounds(4, database):
            job_execution_id = submit(repository, 1, job=f"job {number}").job_execution_id
            complete(repository, claim(repository)[0])
            outcomes = race(*(lambda own=own, job=job_execution_id: own.executions.finalise(job) for own in owns))
            assert outcomes == [ExecutionStatus.COMPLETED] * 20


def test_a_purge_and_a_restart_never_meet_half_way(database: Database, repository: JobRepository) -> None:
    """Either the history is gone and the restart finds nothing, or it runs and all of the history stays."""
    add_node(repository)
    tables = repository.tables
    with contestants(database, 2) as (purger, restarter):
        for number in rounds(30, database):
            old = submit(repository, 3, job=f"job {number}").job_execution_id
            fail_all(repository, old)
            outcomes = race(
                lambda: purger.retention.purge(older_than_s=-1) and None,
                lambda old=old: restarter.executions.restart(old, place=to_nobody),
            )
            assert errors(outcomes, JobExecutionNotFoundError) == []
            with repository.engine.connect() as connection:
                counts = [
                    connection.execute(select(func.count()).select_from(table)).scalar_one()
                    for table in (tables.instances, tables.executions, tables.partitions)
                ]
            if isinstance(outcomes[1], JobExecutionNotFoundError):
                assert counts == [0, 0, 0]
            else:
                assert isinstance(outcomes[1], Launched)
                assert counts == [1, 2, 6]
                repository.executions.stop(outcomes[1].job_execution_id, reason="next round")
                repository.retention.purge(older_than_s=-1)


def test_a_purge_and_a_submit_never_meet_half_way(database: Database, repository: JobRepository) -> None:
    add_node(repository)
    with contestants(database, 2) as (purger, submitter):
        for _ in rounds(30, database):
            old = submit(repository, 2).job_execution_id
            fail_all(repository, old)
            outcomes = race(
                lambda: purger.retention.purge(older_than_s=-1) and None,
                lambda: submit(submitter, 2),
            )
            assert errors(outcomes) == []
            launched = outcomes[1]
            assert isinstance(launched, Launched)
            if launched.created:
                assert statuses(repository, launched.job_execution_id) == {"PENDING": 2}
                repository.executions.stop(launched.job_execution_id, reason="next round")
            repository.retention.purge(older_than_s=-1)


def test_stops_and_restarts_leave_at_most_one_active(database: Database, repository: JobRepository) -> None:
    with contestants(database, 4) as owns:
        old = submit(repository, 2).job_execution_id
        for _ in rounds(10, database):
            outcomes = race(
                *(
                    (lambda own=own: own.executions.restart(old, place=to_nobody))
                    if at % 2
                    else (lambda own=own: own.executions.stop(old, reason="enough"))
                    for at, own in enumerate(owns)
                )
            )
            assert errors(outcomes, JobAlreadyCompleteError) == []
            active = [one for one in repository.reading.recent(limit=1000) if one.status.is_active]
            assert len(active) <= 1
            for one in active:
                repository.executions.stop(one.job_execution_id, reason="next round")
