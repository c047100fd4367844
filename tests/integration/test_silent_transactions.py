"""Transactions whose process says nothing any more, with a row locked: the server ends them."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from airflow_dbpartition import dialects
from airflow_dbpartition.dialects import OWN_TRANSACTION
from airflow_dbpartition.domain import Counters, NodeStatus
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.resilience.chaos import let_time_pass
from tests.scenarios import OFTEN, add_node, claim_one, partition, remove, submit, sweep
from tests.worker.contexts import Flights, context_of

LIMIT_S = 1


@pytest.fixture
def database(database: Database) -> Database:
    if database.name == "sqlite":
        pytest.skip("SQLite's locks end with the process that holds them")
    return database


def test_silence_between_fence_and_commit_ends_the_transaction_and_frees_the_partition(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "COMMIT_WITHIN_S", LIMIT_S)
    users = JobRepository.connect(database.config(statement_timeout_s=None))
    repository = database.migrated()
    add_node(repository, "a")
    job = submit(repository, settings=OFTEN, to="a")
    claim = claim_one(repository, "a")
    flights = Flights(repository)

    with users.engine.connect() as connection:
        flights.write(connection, 1)
        repository.settlements.checkpoint(connection, claim, checkpoint={"at": 1}, counters=Counters())
        remove(repository, "a")
        let_time_pass(LIMIT_S + 1.0)
        sweep(repository)
        with pytest.raises(SQLAlchemyError):
            connection.commit()
        connection.invalidate()
    row = partition(repository, job.job_execution_id)
    assert (row.checkpoint, row.assigned_node) == (None, None)
    assert flights.written() == []
    users.close()
    repository.close()


def test_a_user_may_take_his_time_before_the_fence_also_in_the_next_transaction(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "COMMIT_WITHIN_S", LIMIT_S)
    users = JobRepository.connect(database.config(statement_timeout_s=None, pool_size=1))
    repository = database.migrated()
    add_node(repository, "a")
    submit(repository, to="a")
    flights = Flights(repository)
    ctx = context_of(claim_one(repository, "a"), users)
    for number in (1, 2):
        with ctx.transaction() as connection:
            flights.write(connection, number)
            let_time_pass(LIMIT_S + 0.5)
    assert flights.written_ids() == [1, 2]
    users.close()
    repository.close()


def test_a_transaction_of_our_own_that_falls_silent_is_ended_by_the_server(database: Database) -> None:
    """As a node frozen in the middle of its heartbeat holds the row by which it is judged."""
    repository = database.migrated()
    add_node(repository, "a")
    frozen = JobRepository.connect(database.config(statement_timeout_s=float(LIMIT_S), lock_timeout_s=1.0))
    nodes = repository.tables.nodes
    own = frozen.engine.execution_options(**{OWN_TRANSACTION: True})
    with own.connect() as connection:
        connection.execute(select(nodes.c.node_id).where(nodes.c.node_id == "a").with_for_update()).all()
        let_time_pass(LIMIT_S + 1.0)
        remove(repository, "a")
        with pytest.raises(SQLAlchemyError):
            connection.execute(select(1))
        connection.invalidate()
    assert [node.status for node in repository.nodes.all(include_removed=True)] == [NodeStatus.REMOVED]
    frozen.close()
    repository.close()
