"""The four roles, really created: each can do its own verbs, and is refused the others in one line."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from airflow_dbpartition import migrations, revision
from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import Claim, Counters, ExecutionStatus, JobIdentity, JobSettings, Partition
from airflow_dbpartition.errors import DatabaseError, OwnershipLostError
from airflow_dbpartition.grants import ROLES, grants_sql
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.schema import VERSION_TABLE
from airflow_dbpartition.views import VIEW_NAMES
from tests.databases import Database, NotAtHandError, Servers, run_sql, with_user
from tests.scenarios import (
    OFTEN,
    QUICK,
    add_node,
    age_partitions,
    claim,
    claim_one,
    complete,
    fail_all,
    partition,
    remove,
    silence,
    submit,
    to_nobody,
)

PASSWORD = secrets.token_hex(8)


@dataclass
class Staff:
    """The administrator's repository, and one for a user of each role."""

    owner: JobRepository
    database: Database
    repositories: dict[str, JobRepository] = field(default_factory=dict)

    def __getattr__(self, role: str) -> JobRepository:
        return self.repositories[f"dbpartition_{role}"]


def _login(database: Database, user: str, role: str) -> list[str]:
    if database.name == "postgresql":
        return [f"CREATE ROLE {user} LOGIN PASSWORD '{PASSWORD}' IN ROLE {role}"]
    return [
        f"CREATE USER {user} IDENTIFIED BY '{PASSWORD}'",
        f"GRANT {role} TO {user}",
        f"SET DEFAULT ROLE {role} FOR {user}",
    ]


def _forget(database: Database, name: str, *, is_role: bool) -> list[str]:
    if database.name == "postgresql":
        return [f"DROP OWNED BY {name}", f"DROP ROLE {name}"]
    return [f"DROP {'ROLE' if is_role else 'USER'} {name}"]


def _existing_roles(owner: JobRepository) -> set[str]:
    on_postgres = owner.engine.dialect.name == "postgresql"
    query = "SELECT rolname FROM pg_roles" if on_postgres else "SELECT user FROM mysql.user"
    with owner.engine.connect() as connection:
        return set(connection.scalars(text(query)))


@pytest.fixture(params=["postgresql", "mysql"])
def staff(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Staff]:
    """Roles are the server's, not the database's: those that were there already are left there."""
    try:
        server = servers.get(request.param)
    except NotAtHandError as reason:
        pytest.skip(str(reason))
    with server.fresh() as database:
        owner = database.migrated()
        staff = Staff(owner, database)
        before = _existing_roles(owner)
        users = {role: f"{role}_{secrets.token_hex(3)}" for role in ROLES}
        try:
            run_sql(database, *grants_sql(owner.tables, owner.engine.dialect))
            for role, user in users.items():
                run_sql(database, *_login(database, user, role))
                seen = with_user(database, user, PASSWORD)
                staff.repositories[role] = JobRepository.connect(seen.config(pool_size=1))
            yield staff
        finally:
            for repository in (owner, *staff.repositories.values()):
                repository.close()
            for role, user in users.items():
                run_sql(database, *_forget(database, user, is_role=False))
                if role not in before:
                    with suppress(SQLAlchemyError):  # another run of these tests may be using it
                        run_sql(database, *_forget(database, role, is_role=True))


def refused(verb: Callable[[], object]) -> None:
    """One line that names the table and the way out."""
    with pytest.raises(DatabaseError) as raised:
        verb()
    message = str(raised.value)
    assert "denied" in message
    assert "dbpartition db sql" in message
    assert "\n" not in message
    assert PASSWORD not in message


def checkpoint(repository: JobRepository, taken: Claim) -> None:
    with repository.engine.begin() as connection:
        repository.settlements.checkpoint(connection, taken, checkpoint={"n": 1}, counters=Counters())


def test_a_worker_can_do_all_that_workers_do(staff: Staff) -> None:
    worker: JobRepository = staff.worker
    revision.require_current(worker.engine, worker.schema)
    for name in ("a", "b", "dead"):
        add_node(worker, name)
    planned = [Partition(f"p{number}", transferable=True) for number in range(8)]
    settings = JobSettings(partition_retries=1, max_node_losses=9)
    to = {one.key: "dead" if one.key in ("p6", "p7") else None for one in planned}
    launched = submit(staff.owner, planned, to=to, settings=settings)
    claim_one(worker, "dead")
    silence(staff.owner, "dead", 40)
    report = Recovery(worker, QUICK).sweep(may_judge=True, deep=True)
    assert (report.removed, sum(rehomed.reassigned for _, rehomed in report.rehomed)) == (["dead"], 2)
    age_partitions(staff.owner, 10)
    first, second, third, fourth, *rest = claim(worker, "a", 8)
    worker.claims.mark_started(launched.job_execution_id)
    assert len(worker.nodes.heartbeat("a", current_load=8).held) == 4 + len(rest)
    checkpoint(worker, first)
    complete(worker, first, result={"rows": 1}, write=1)
    worker.settlements.fail(second, message="boom")
    worker.settlements.retry(third, message="again", delay_s=0)
    worker.settlements.release(fourth, message="leaving")
    age_partitions(staff.owner, 10)
    assert any(one.stolen_from for one in claim(worker, "b", 9) + claim(worker, "b", 9, steal_after_s=1))
    for one in rest:
        worker.settlements.stop(one)
    assert not worker.claims.waiting(node_id="b", node_group="default", steps=["work"])
    worker.executions.stop(launched.job_execution_id, reason="fail_fast")
    Recovery(worker, QUICK).leave("b")
    Recovery(worker, QUICK).leave("a")
    assert worker.reading.execution(launched.job_execution_id).status is ExecutionStatus.FAILED


def test_a_worker_plans_nothing_and_deletes_nothing(staff: Staff) -> None:
    worker: JobRepository = staff.worker
    add_node(worker)
    old = submit(staff.owner, 2).job_execution_id
    fail_all(staff.owner, old)
    refused(lambda: submit(worker, 1, job="new"))
    refused(lambda: worker.executions.restart(old, place=to_nobody))
    refused(lambda: worker.retention.purge(older_than_s=-1))
    for table in ("batch_nodes", "batch_job_executions", "batch_partitions", "batch_partition_events", VERSION_TABLE):
        refused_sql(staff, worker, f"DELETE FROM {table}")
    refused_sql(staff, worker, f"UPDATE {VERSION_TABLE} SET version_num = 'x'")
    refused_sql(staff, worker, "UPDATE batch_job_instances SET job_name = 'x'")
    refused_sql(staff, worker, "UPDATE batch_partition_events SET message = 'x'")
    assert staff.owner.reading.execution(old).status is ExecutionStatus.FAILED


def refused_sql(staff: Staff, repository: JobRepository, statement: str) -> None:
    """What no verb does, by hand."""
    if repository.schema:
        for word in ("FROM ", "UPDATE ", "INTO ", "TABLE "):
            statement = statement.replace(word, f"{word}{repository.schema}.")
    refused(lambda: repository.transactions.run(lambda connection: connection.execute(text(statement))))


@pytest.mark.parametrize("role", ROLES)
def test_no_role_changes_the_schema(staff: Staff, role: str) -> None:
    repository = staff.repositories[role]
    refused_sql(staff, repository, "CREATE TABLE mine (x INTEGER)")
    with pytest.raises(DatabaseError):
        repository.transactions.run(
            lambda connection: connection.execute(text(f"DROP TABLE {_qualified(repository, 'batch_partitions')}"))
        )
    assert migrations.differences(staff.owner.engine, staff.owner.schema) == []


def _qualified(repository: JobRepository, name: str) -> str:
    return f"{repository.schema}.{name}" if repository.schema else name


def test_a_manager_can_do_all_that_operators_sensors_and_people_do(staff: Staff) -> None:
    manager: JobRepository = staff.manager
    revision.require_current(manager.engine, manager.schema)
    add_node(staff.worker, "a")
    add_node(staff.worker, "dead")
    launcher = Launcher(manager, timings=Timings())
    job = Job(
        identity=JobIdentity("job"),
        step_name="work",
        partitioner=lambda grid_size: [Partition(f"p{number}", transferable=True) for number in range(4)],
        owner_token="one",
        settings=OFTEN,
    )
    first = launcher.launch(job)
    assert first.created
    again = launcher.launch(Job(**{**job.__dict__, "owner_token": "two"}))
    assert (again.job_execution_id, again.created) == (first.job_execution_id, False)
    with pytest.raises(OwnershipLostError):
        manager.executions.stop(first.job_execution_id, owner_token="one", reason="on_kill")
    lost = claim_one(staff.worker, "dead")
    silence(staff.owner, "dead", 40)
    report = Recovery(manager, QUICK).sweep(may_judge=True)
    assert report.removed == ["dead"]
    assert partition(manager, first.job_execution_id, lost.partition_key).node_losses == 1
    assert manager.nodes.drain("a")
    manager.executions.stop(first.job_execution_id, owner_token="two", reason="enough")
    restarted = launcher.restart(first.job_execution_id)
    assert restarted.created
    manager.executions.stop(restarted.job_execution_id, reason="enough")
    manager.executions.abandon(restarted.job_execution_id)
    assert manager.reading.summary(restarted.job_execution_id).status is ExecutionStatus.ABANDONED
    empty = submit(manager, 0, job="empty").job_execution_id
    assert manager.executions.finalise(empty) is ExecutionStatus.COMPLETED
    assert {event.event for event in manager.reading.events(first.job_execution_id)} >= {"lost", "stopped"}


def test_a_manager_is_no_node_and_deletes_nothing(staff: Staff) -> None:
    manager: JobRepository = staff.manager
    old = submit(manager, 2).job_execution_id
    manager.executions.stop(old, reason="enough")
    refused(lambda: add_node(manager))
    refused(lambda: manager.retention.purge(older_than_s=-1))
    refused_sql(staff, manager, "DELETE FROM batch_partitions")
    assert manager.reading.execution(old).status is ExecutionStatus.STOPPED


def test_a_reader_reads_everything_and_writes_nothing(staff: Staff) -> None:
    reader: JobRepository = staff.reader
    add_node(staff.owner)
    job_execution_id = submit(staff.owner, 2, settings=JobSettings(partition_retries=1)).job_execution_id
    taken = claim_one(staff.owner)
    staff.owner.settlements.retry(taken, message="again", delay_s=0)
    taken = claim_one(staff.owner)

    revision.require_current(reader.engine, reader.schema)
    assert migrations.differences(reader.engine, reader.schema) == []
    assert [node.node_id for node in reader.nodes.all()] == ["a"]
    assert reader.reading.recent()[0].job_execution_id == job_execution_id
    assert reader.reading.progress([job_execution_id])[job_execution_id].total == 2
    assert len(reader.reading.partitions(job_execution_id)) == 2
    assert [event.event for event in reader.reading.events(job_execution_id)] == ["retried"]
    assert reader.reading.summary(job_execution_id).counts["claimed"] == 1
    assert list(reader.reading.iter_results(job_execution_id)) == []
    assert reader.reading.failures(job_execution_id) == []
    with reader.engine.connect() as connection:
        for view in VIEW_NAMES:
            assert connection.scalar(text(f"SELECT count(*) FROM {_qualified(reader, view)}")) == 1

    for verb in (
        lambda: add_node(reader, "b"),
        lambda: reader.nodes.heartbeat("a", current_load=0),
        lambda: reader.nodes.drain("a"),
        lambda: submit(reader, 1, job="new"),
        lambda: reader.executions.stop(job_execution_id, reason="x"),
        lambda: reader.executions.attach(job_execution_id, owner_token="x"),
        lambda: claim(reader),
        lambda: complete(reader, taken),
        lambda: remove(reader, "a"),
        lambda: reader.retention.purge(older_than_s=-1),
    ):
        refused(verb)
    assert reader.reading.summary(job_execution_id).counts["claimed"] == 1


def test_retention_deletes_what_is_over_and_begins_nothing(staff: Staff) -> None:
    retention: JobRepository = staff.retention
    add_node(staff.owner, "gone")
    add_node(staff.owner, "a")
    remove(staff.owner, "gone")
    old = submit(staff.owner, 2, job="old").job_execution_id
    fail_all(staff.owner, old)
    active = submit(staff.owner, 2, job="active").job_execution_id
    taken = claim_one(staff.owner)
    revision.require_current(retention.engine, retention.schema)
    purged = retention.retention.purge(older_than_s=-1)
    assert (purged.instances, purged.executions, purged.partitions, purged.nodes) == (1, 1, 2, 1)
    assert [one.job_execution_id for one in retention.reading.recent()] == [active]
    refused(lambda: add_node(retention, "b"))
    refused(lambda: retention.nodes.heartbeat("a", current_load=0))
    refused(lambda: submit(retention, 1, job="new"))
    refused(lambda: retention.settlements.fail(taken, message="events are not its to write"))
    assert partition(staff.owner, active).status.value == "CLAIMED"


def test_the_grants_can_be_applied_again(staff: Staff) -> None:
    run_sql(staff.database, *grants_sql(staff.owner.tables, staff.owner.engine.dialect))
    add_node(staff.worker)


def test_a_user_without_any_role_gets_the_same_one_line(staff: Staff) -> None:
    user = f"nobody_{secrets.token_hex(3)}"
    if staff.database.name == "postgresql":
        run_sql(staff.database, f"CREATE ROLE {user} LOGIN PASSWORD '{PASSWORD}'")
    else:
        run_sql(
            staff.database,
            f"CREATE USER {user} IDENTIFIED BY '{PASSWORD}'",
            f"GRANT SELECT ON {VERSION_TABLE} TO {user}",  # without any right MySQL does not let it in
        )
    repository = JobRepository.connect(with_user(staff.database, user, PASSWORD).config(pool_size=1))
    try:
        refused(lambda: repository.reading.recent())
        refused(lambda: add_node(repository))
    finally:
        repository.close()
        run_sql(staff.database, *_forget(staff.database, user, is_role=False))
