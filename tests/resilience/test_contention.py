"""The repository's verbs among deadlocks, serialisation failures and locks: done once, or not at all and said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.exc import OperationalError

from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.repository import JobRepository
from tests import scenarios
from tests.databases import Database, MysqlServer
from tests.races.racing import race
from tests.resilience import test_broken_connections as stories
from tests.resilience.contended_verbs import LAST_TABLE, Verb, claim, on, purge
from tests.resilience.contention import ALWAYS, CONFLICTS, INJECTED, Injector, locked, met_by, snapshot
from tests.resilience.test_broken_connections import Story
from tests.resilience.test_isolation import snapshot_server
from tests.worker.processes import wait_until

MOST_TRIES = 10
__all__ = ["snapshot_server"]


@pytest.fixture
def injector(database: Database, repository: JobRepository) -> Injector:
    return Injector(database)


# --- errors ----------------------------------------------------------------------------------------------------


@on(
    "postgresql",
    "mysql",
    verbs=LAST_TABLE,
    short={*(f"{verb.__name__}-postgresql" for verb in LAST_TABLE), "claim-mysql"},
)
def test_a_verb_gives_up_when_errors_do_not_end_and_is_done_once_when_they_do(
    database: Database, repository: JobRepository, injector: Injector, verb: Verb
) -> None:
    story, errors = verb(repository), CONFLICTS[database.name]
    _, act = next(story)
    before = snapshot(repository)
    met = met_by(repository.engine)

    injector.arm(LAST_TABLE[verb], *errors, times=ALWAYS)
    with pytest.raises(DatabaseError, match=rf"^database {database.name}.*{INJECTED}"):
        act(repository)
    assert len(errors) < len(met.errors) <= MOST_TRIES
    assert snapshot(repository) == before

    met.errors.clear()
    injector.arm(LAST_TABLE[verb], *errors, times=len(errors))
    act(repository)
    assert met.codes == list(errors)
    injector.disarm()
    assert next(story, None) is None


@on("postgresql", verbs=(stories.plan, claim, stories.complete), short={"claim-postgresql"})
def test_a_verb_whose_commit_is_refused_for_serialisation_is_done_once(
    database: Database, repository: JobRepository, injector: Injector, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    met = met_by(repository.engine)
    injector.arm(LAST_TABLE[verb], "40001", times=2, at_commit=True)
    act(repository)
    assert met.codes == ["40001", "40001"]
    injector.disarm()
    assert next(story, None) is None


# --- locks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(database: Database, repository: JobRepository) -> Iterator[JobRepository]:
    """The same job repository, for somebody who waits for no lock for long."""
    hurried = JobRepository.connect(database.config(pool_size=1, lock_timeout_s=0.1))
    yield hurried
    hurried.close()


@on("postgresql", "sqlite", "mysql", short={"claim-postgresql", "claim-sqlite"})
def test_a_verb_gives_up_when_a_lock_is_not_let_go_and_is_done_once_when_it_is(
    database: Database, repository: JobRepository, hurried: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    before = snapshot(repository)
    met = met_by(hurried.engine)
    with locked(database, LAST_TABLE[verb]), pytest.raises(DatabaseError, match=r"(?i)lock"):
        act(hurried)
    assert 1 < len(met.errors) <= MOST_TRIES
    assert set(met.codes) <= {"55P03", 1205, "database is locked"}
    assert snapshot(repository) == before

    met.errors.clear()
    with locked(database, LAST_TABLE[verb]) as let_go:
        met.then = let_go
        act(hurried)
    assert len(met.errors) == 1
    assert next(story, None) is None


def stop_waiting(repository: JobRepository) -> Story:
    job = scenarios.submit(repository, 2).job_execution_id
    yield b"", lambda through: through.executions.stop(job, reason="enough")
    assert scenarios.statuses(repository, job) == {"STOPPED": 2}
    assert repository.reading.execution(job).status == "STOPPED"
    assert scenarios.event_names(repository, job) == ["stopped", "stopped"]


@on("postgresql", "mysql", verbs=(stories.retry, stop_waiting, purge), short={"retry-postgresql", "retry-mysql"})
def test_a_verb_that_a_deadlock_has_cost_its_transaction_is_done_once(
    database: Database, repository: JobRepository, verb: Verb
) -> None:
    story = verb(repository)
    _, act = next(story)
    met = met_by(repository.engine)
    with _against_the_order(database) as (lock_partitions, lock_executions):
        lock_partitions()
        race(lambda: act(repository), lock_executions)
    assert met.codes == ["40P01" if database.name == "postgresql" else 1213]
    assert next(story, None) is None


@contextlib.contextmanager
def _against_the_order(database: Database) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Somebody who locks partitions before executions, and whom no server makes the victim."""
    engine = database.plain_engine()
    with engine.connect() as connection, engine.connect() as looking:

        def lock_partitions() -> None:
            if database.name == "postgresql":  # who waits for so long is the one that looks for deadlocks
                connection.exec_driver_sql("SET deadlock_timeout = '1min'")
            else:  # who has written least is the victim
                connection.exec_driver_sql("CREATE TABLE much (written integer)")
                for number in range(100):
                    connection.exec_driver_sql(f"INSERT INTO much VALUES ({number})")
            connection.exec_driver_sql("SELECT 1 FROM batch_partitions FOR UPDATE")

        def lock_executions() -> None:
            wait_until(are_held, "the verb holds an execution")
            connection.exec_driver_sql("SELECT 1 FROM batch_job_executions FOR UPDATE")
            connection.commit()

        def are_held() -> bool:
            try:
                looking.exec_driver_sql("SELECT 1 FROM batch_job_executions FOR UPDATE NOWAIT")
            except OperationalError:
                return True
            finally:
                looking.rollback()
            return False

        yield lock_partitions, lock_executions
    engine.dispose()


@pytest.mark.resilience_long
def test_a_claim_whose_commit_a_backup_holds_up_is_taken_back_and_can_be_repeated(snapshot_server: MysqlServer) -> None:
    with snapshot_server.fresh() as database:
        repository = database.migrated(lock_timeout_s=1.0)
        story = claim(repository)
        _, act = next(story)
        before = snapshot(repository)
        met = met_by(repository.engine)
        engine = database.plain_engine()
        with engine.connect() as backup:
            for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"):
                backup.exec_driver_sql(f"BACKUP STAGE {stage}")
            with pytest.raises(DatabaseError, match="Lock wait timeout"):
                act(repository)
            backup.exec_driver_sql("BACKUP STAGE END")
        engine.dispose()
        assert set(met.codes) == {1205}
        assert snapshot(repository) == before
        act(repository)
        assert next(story, None) is None
        repository.close()
