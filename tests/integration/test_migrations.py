"""The schema: made, upgraded, compared, printed, looked at through its views, and served by its indexes."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import event, inspect, text
from sqlalchemy.engine import Engine

from airflow_dbpartition import migrations, revision
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import make_engine
from airflow_dbpartition.domain import PartitionStatus
from airflow_dbpartition.errors import ConfigurationError, DatabaseError, DbPartitionError, SchemaError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.schema import VERSION_TABLE
from airflow_dbpartition.views import VIEW_NAMES
from tests.databases import NAMES, Database, Servers, run_sql
from tests.scenarios import (
    add_node,
    age_partitions,
    claim,
    complete,
    fail_all,
    finish_all,
    remove,
    submit,
    sweep,
)

PRINTED = Path(__file__).parents[2] / "sql"
TABLES = {
    "batch_nodes",
    "batch_job_instances",
    "batch_job_executions",
    "batch_partitions",
    "batch_partition_events",
    VERSION_TABLE,
}


@pytest.fixture
def own_engine(database: Database) -> Iterator[Engine]:
    """This package's engine on an empty database of each kind."""
    engine = make_engine(database.config())
    yield engine
    engine.dispose()


# --- printed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_sql_folder_is_what_the_code_prints(name: str) -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in (PRINTED / name).iterdir()}
    assert found == migrations.print_sql(name), "run `make sql`"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_the_same_every_time(name: str) -> None:
    """A table's indexes are a set: their order must not depend on where they lie in memory."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert len({str(printed) for printed in pool.map(migrations.print_sql, [name] * 4)}) == 1


def test_only_supported_databases_are_printed() -> None:
    with pytest.raises(ConfigurationError, match="postgresql, mysql, sqlite, got 'oracle'"):
        migrations.print_sql("oracle")
    assert migrations.print_sql("mariadb") == migrations.print_sql("mysql")


def apply_script(database: Database, engine: Engine, script: str) -> None:
    """As an administrator would, with the database's own tool."""
    if database.name == "sqlite":
        with sqlite3.connect(str(engine.url.database)) as connection:
            connection.executescript(script)
        return
    statements = [statement for statement in script.split(";\n") if statement.strip()]
    run_sql(database, *statements)


def test_the_printed_sql_makes_what_an_upgrade_makes(database: Database, own_engine: Engine) -> None:
    printed = migrations.print_sql(database.name, database.schema)
    apply_script(database, own_engine, printed["schema.sql"])
    assert migrations.differences(own_engine, database.schema) == [
        f"missing view {name}" for name in sorted(VIEW_NAMES)
    ]
    apply_script(database, own_engine, printed["views.sql"])
    assert migrations.differences(own_engine, database.schema) == []
    revision.require_current(own_engine, database.schema)
    head = revision.head_revision()
    assert migrations.upgrade(own_engine, database.schema) == (head, head)
    repository = JobRepository(own_engine, database.schema)
    add_node(repository)
    finish_all(repository, submit(repository, 3).job_execution_id)


def described(database: Database) -> dict[str, Any]:
    """All that the database itself says of our tables, in an order that does not depend on how they were made."""
    engine = database.plain_engine()
    inspector = inspect(engine)
    found: dict[str, Any] = {}
    for table in sorted(TABLES):
        found[table] = {
            "columns": [
                (column["name"], repr(column["type"]), column["nullable"], _without(column["default"], database))
                for column in inspector.get_columns(table)
            ],
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "unique": sorted(map(_told, inspector.get_unique_constraints(table))),
            "checks": sorted(map(_told, inspector.get_check_constraints(table))),
            "foreign keys": sorted(map(_told, inspector.get_foreign_keys(table))),
            "indexes": sorted(map(_told, inspector.get_indexes(table))),
            "options": _told(inspector.get_table_options(table)),
        }
    if database.name == "postgresql":
        with engine.connect() as connection:
            query = "SELECT relname, reloptions FROM pg_class WHERE relnamespace = CAST(:schema AS regnamespace)"
            rows = connection.execute(text(query + " AND relkind = 'r'"), {"schema": database.schema})
            found["storage"] = sorted((row.relname, str(row.reloptions)) for row in rows)
    engine.dispose()
    return found


def _told(found: Any) -> str:
    # MySQL counts on where a table left off; nothing else differs from one table to another.
    if isinstance(found, dict):
        return str(sorted((key, _told(value)) for key, value in found.items() if key != "mysql_auto_increment"))
    return str(found)


def _without(default: str | None, database: Database) -> str | None:
    """Sequences are named with their schema, which is each test's own."""
    return default.replace(f"{database.schema}.", "") if default else default


def test_an_upgrade_makes_the_very_tables_that_are_printed(database: Database, servers: Servers) -> None:
    """Keys, constraints, index orders and conditions too, which a comparison of columns does not see."""
    engine = make_engine(database.config())
    migrations.upgrade(engine, database.schema)
    upgraded = described(database)
    with servers.get(database.name).fresh() as other:
        other_engine = make_engine(other.config())
        printed = migrations.print_sql(other.name, other.schema)
        apply_script(other, other_engine, printed["schema.sql"])
        applied = described(other)
        other_engine.dispose()
    engine.dispose()
    assert any(upgraded["batch_partitions"]["indexes"])
    # Alembic makes the version table itself: its key has a name.
    assert {**upgraded, VERSION_TABLE: None} == {**applied, VERSION_TABLE: None}


# --- made and upgraded -------------------------------------------------------------------------------------------


def test_an_upgrade_makes_everything_and_a_second_one_nothing(database: Database, own_engine: Engine) -> None:
    head = revision.head_revision()
    assert migrations.upgrade(own_engine, database.schema) == (None, head)
    repository = JobRepository(own_engine, database.schema)
    job_execution_id = submit(repository, 3).job_execution_id
    assert migrations.upgrade(own_engine, database.schema) == (head, head)
    assert len(repository.reading.partitions(job_execution_id)) == 3
    assert set(inspect(own_engine).get_table_names(schema=database.schema)) == TABLES
    assert set(inspect(own_engine).get_view_names(schema=database.schema)) == set(VIEW_NAMES)


def test_a_migrated_database_has_the_schema_that_the_code_is_written_for(repository: JobRepository) -> None:
    assert migrations.differences(repository.engine, repository.schema) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("ALTER TABLE batch_partitions ADD COLUMN extra INTEGER", "remove column batch_partitions.extra"),
        ("DROP VIEW batch_cluster", "missing view batch_cluster"),
        ("DROP TABLE batch_partition_events", "batch_partition_events"),
        ("DROP INDEX ix_batch_nodes_status{on_table}", "missing index batch_nodes.ix_batch_nodes_status"),
    ],
    ids=["column", "view", "table", "index"],
)
def test_what_somebody_changed_by_hand_is_found(
    database: Database, repository: JobRepository, change: str, found: str
) -> None:
    run_sql(database, change.format(on_table=" ON batch_nodes" if database.name == "mysql" else ""))
    differences = migrations.differences(repository.engine, repository.schema)
    assert any(found in difference for difference in differences), differences


def test_an_upgrade_brings_lost_views_back(database: Database, repository: JobRepository) -> None:
    run_sql(database, "DROP VIEW batch_cluster")
    migrations.upgrade(repository.engine, repository.schema)
    assert migrations.differences(repository.engine, repository.schema) == []


def _upgrade_in_process(config: DatabaseConfig, _number: int) -> tuple[str | None, str]:
    engine = make_engine(config)
    try:
        return migrations.upgrade(engine, config.schema)
    finally:
        engine.dispose()


def test_several_processes_upgrade_at_once(database: Database, own_engine: Engine) -> None:
    """As the init containers of a deployment do."""
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(partial(_upgrade_in_process, database.config()), range(4), timeout=120))
    head = revision.head_revision()
    assert sorted(outcomes, key=str) == [(head, head)] * 3 + [(None, head)]
    assert migrations.differences(own_engine, database.schema) == []


def test_airflows_own_tables_in_the_same_place_are_left_alone(database: Database, own_engine: Engine) -> None:
    """Airflow keeps its revision in alembic_version, and ours must neither read, move nor miss it."""
    run_sql(
        database,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('509b94a1042d')",
        "CREATE TABLE dag_run (id INTEGER PRIMARY KEY, dag_id VARCHAR(250))",
    )
    with pytest.raises(SchemaError, match="missing"):
        revision.require_current(own_engine, database.schema)
    migrations.upgrade(own_engine, database.schema)
    assert migrations.differences(own_engine, database.schema) == []
    prefix = f"{database.schema}." if database.schema else ""
    with own_engine.connect() as connection:
        assert connection.scalars(text(f"SELECT version_num FROM {prefix}alembic_version")).all() == ["509b94a1042d"]
        assert connection.scalars(text(f"SELECT version_num FROM {prefix}{VERSION_TABLE}")).all() == [
            revision.head_revision()
        ]
    assert set(inspect(own_engine).get_table_names(schema=database.schema)) == TABLES | {"alembic_version", "dag_run"}


@pytest.mark.parametrize("schema", ["plain", 'Mixed "Case" and-dash', "select", "ünïcode"])
def test_a_named_schema_is_made_and_used_whatever_its_name(postgres: Database, schema: str) -> None:
    """The search path leads elsewhere, so a name that is not qualified is an error here."""
    schema = f"{postgres.schema} {schema}" if " " in schema else f"{postgres.schema}{schema}"
    engine = make_engine(DatabaseConfig(url=postgres.url, schema=schema, pool_size=1))
    repository = JobRepository(engine, schema)
    quoted = engine.dialect.identifier_preparer.quote(schema)
    try:
        assert migrations.upgrade(engine, schema) == (None, revision.head_revision())
        assert migrations.upgrade(engine, schema)[0] == revision.head_revision()
        assert migrations.differences(engine, schema) == []
        revision.require_current(engine, schema)
        add_node(repository)
        add_node(repository, "gone")
        job_execution_id = submit(repository, 3, to={"p0": "gone", "p1": None, "p2": None}).job_execution_id
        remove(repository, "gone")
        sweep(repository)
        fail_all(repository, job_execution_id)
        again = repository.executions.restart(job_execution_id, place=lambda work: {}).job_execution_id
        finish_all(repository, again)
        assert repository.reading.summary(again).counts["completed"] == 3
        with engine.connect() as connection:
            for view in VIEW_NAMES:
                assert connection.scalar(text(f"SELECT count(*) FROM {quoted}.{view}"))
        assert repository.retention.purge(older_than_s=-1).partitions == 6
        assert not set(inspect(engine).get_table_names(schema="public")) & TABLES
    finally:
        repository.close()
        run_sql(postgres, f"DROP SCHEMA IF EXISTS {quoted} CASCADE")


def test_a_printed_schema_with_a_name_can_be_applied(postgres: Database) -> None:
    schema = f"{postgres.schema} Printed"
    engine = make_engine(DatabaseConfig(url=postgres.url, schema=schema, pool_size=1))
    try:
        printed = migrations.print_sql("postgresql", schema)
        for name in ("schema.sql", "views.sql"):
            apply_script(postgres, engine, printed[name])
        assert migrations.differences(engine, schema) == []
    finally:
        engine.dispose()
        run_sql(postgres, f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')


# --- refused -----------------------------------------------------------------------------------------------------


def assert_one_line(error: pytest.ExceptionInfo[DbPartitionError], *words: str) -> None:
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_missing_tables_are_one_line_that_names_the_command(database: Database, own_engine: Engine) -> None:
    with pytest.raises(SchemaError) as raised:
        revision.require_current(own_engine, database.schema)
    assert_one_line(raised, "missing", "dbpartition db upgrade")
    repository = JobRepository(own_engine, database.schema)
    for verb in (
        lambda: add_node(repository),
        lambda: submit(repository),
        lambda: claim(repository),
        lambda: sweep(repository),
        lambda: repository.reading.recent(),
        lambda: repository.retention.purge(older_than_s=1),
    ):
        with pytest.raises(SchemaError) as raised:
            verb()
        assert_one_line(raised, "missing", "dbpartition db upgrade")


def test_an_older_schema_is_one_line_that_names_the_command(
    repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = revision.head_revision()
    monkeypatch.setattr(revision, "REVISIONS", (found, "9999"))
    with pytest.raises(SchemaError) as raised:
        revision.require_current(repository.engine, repository.schema)
    assert_one_line(raised, f"is at revision {found}, this version needs 9999", "dbpartition db upgrade")


def test_the_revisions_are_those_that_there_are_migrations_to() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert [script.revision for script in scripts.walk_revisions()] == list(reversed(revision.REVISIONS))


def test_a_newer_schema_is_refused_and_left_as_it_is(database: Database, repository: JobRepository) -> None:
    run_sql(database, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    for verb in (revision.require_current, migrations.upgrade):
        with pytest.raises(SchemaError) as raised:
            verb(repository.engine, repository.schema)
        assert_one_line(raised, "is at revision 9999, which this version", "install")
    assert migrations.differences(repository.engine, repository.schema) == []


@pytest.mark.parametrize("verb", [revision.require_current, migrations.upgrade, migrations.differences])
@pytest.mark.parametrize("url", ["postgresql://u:s3cret@127.0.0.1:1/d", "mysql://u:s3cret@127.0.0.1:1/d"])
def test_a_database_that_cannot_be_reached_is_one_line_without_its_password(
    verb: Callable[[Engine], object], url: str
) -> None:
    if url.startswith("mysql"):
        pytest.importorskip("pymysql")
    with pytest.raises(DatabaseError) as raised:
        verb(make_engine(DatabaseConfig(url=url)))
    assert_one_line(raised, "127.0.0.1:1")
    assert "s3cret" not in str(raised.value)


def test_an_upgrade_that_fails_half_way_leaves_nothing(database: Database, own_engine: Engine) -> None:
    """Somebody else's table is in the way; where DDL is transactional, all of ours is gone again."""
    if database.name == "mysql":
        pytest.skip("MySQL commits at each DDL statement")
    run_sql(database, "CREATE TABLE batch_partition_events (theirs INTEGER)")
    with pytest.raises(DatabaseError) as raised:
        migrations.upgrade(own_engine, database.schema)
    assert_one_line(raised, "batch_partition_events")
    assert inspect(own_engine).get_table_names(schema=database.schema) == ["batch_partition_events"]
    run_sql(database, "DROP TABLE batch_partition_events")
    assert migrations.upgrade(own_engine, database.schema)[0] is None


# --- views -------------------------------------------------------------------------------------------------------


def rows_of(repository: JobRepository, view: str, order_by: str) -> list[dict[str, Any]]:
    quoted = repository.engine.dialect.identifier_preparer.quote
    prefix = f"{quote_schema}." if (quote_schema := repository.schema and quoted(repository.schema)) else ""
    with repository.engine.connect() as connection:
        found = connection.execute(text(f"SELECT * FROM {prefix}{view} ORDER BY {order_by}"))
        return [dict(row) for row in found.mappings()]


def test_progress_counts_what_is_there(repository: JobRepository) -> None:
    add_node(repository)
    started = submit(repository, 10, job="mixed", node_group="default").job_execution_id
    one, two, three, failing, stopping, *_running = claim(repository, limit=8)
    repository.claims.mark_started(started)
    for taken, written in ((one, 10), (two, 20), (three, 0)):
        complete(repository, taken, read=written + 1, write=written, skip=1)
    repository.settlements.fail(failing, message="boom")
    repository.settlements.stop(stopping)
    waiting = submit(repository, 2, job="waiting").job_execution_id
    empty = submit(repository, 0, job="empty").job_execution_id
    mixed, untouched, nothing = rows_of(repository, "batch_job_progress", "job_execution_id")
    assert [row["job_execution_id"] for row in (mixed, untouched, nothing)] == [started, waiting, empty]
    names = ("partitions", *(status.value.lower() for status in PartitionStatus))
    assert {name: int(mixed[name]) for name in names} == {
        "partitions": 10,
        "pending": 2,
        "claimed": 3,
        "completed": 3,
        "failed": 1,
        "stopped": 1,
    }
    assert float(mixed["per_cent"]) == 50.0
    assert [int(mixed[name]) for name in ("read_count", "write_count", "skip_count")] == [33, 30, 3]
    assert 0 <= float(mixed["oldest_claim_s"]) < 60
    assert float(mixed["writes_per_second"]) > 0
    assert (mixed["job_name"], mixed["generation"], mixed["status"]) == ("mixed", 1, "STARTED")
    assert (float(untouched["per_cent"]), untouched["oldest_claim_s"]) == (0.0, None)
    assert untouched["writes_per_second"] is None, "it has not started"
    assert (float(nothing["per_cent"]), int(nothing["partitions"]), nothing["status"]) == (100.0, 0, "COMPLETED")


def test_coordination_shows_every_execution_with_its_manager(repository: JobRepository) -> None:
    add_node(repository)
    first = submit(repository, 1, job="daily", manager={"dag_id": "d", "try_number": 1}).job_execution_id
    fail_all(repository, first)
    second = repository.executions.restart(first, place=lambda work: {}, manager={"dag_id": "d", "try_number": 2})
    before, now = rows_of(repository, "batch_job_coordination", "job_execution_id")
    assert [(row["job_execution_id"], row["job_name"], row["status"]) for row in (before, now)] == [
        (first, "daily", "FAILED"),
        (second.job_execution_id, "daily", "STARTING"),
    ]
    assert '"try_number":' in str(now["manager"]).replace("'", '"')
    assert (before["manager_step"], before["generation"]) == ("work", 1)
    assert before["end_time"] is not None
    assert (now["start_time"], now["end_time"]) == (None, None)


def test_the_cluster_is_whoever_is_not_removed_and_what_it_runs(repository: JobRepository) -> None:
    for name in ("busy", "draining", "idle", "removed"):
        add_node(repository, name, capacity=3)
    repository.nodes.drain("draining")
    remove(repository, "removed")
    submit(repository, 4, to={"p0": "busy", "p1": "busy", "p2": "busy", "p3": "removed"})
    done, *_ = claim(repository, "busy", 3)
    complete(repository, done)
    repository.nodes.heartbeat("busy", current_load=2)
    busy, draining, idle = rows_of(repository, "batch_cluster", "node_id")
    assert (busy["node_id"], busy["status"], int(busy["running"]), busy["current_load"]) == ("busy", "ACTIVE", 2, 2)
    assert sorted(busy["running_partitions"].split(", ")) == ["p1", "p2"]
    assert (draining["node_id"], draining["status"], int(draining["running"])) == ("draining", "DRAINING", 0)
    assert (idle["node_id"], idle["running_partitions"], idle["capacity"]) == ("idle", None, 3)
    assert all(-1 < float(row["heartbeat_age_s"]) < 60 for row in (busy, draining, idle))


# --- indexes -----------------------------------------------------------------------------------------------------

HISTORY = 30_000


@pytest.fixture
def full_repository(postgres_repository: JobRepository) -> JobRepository:
    """Long history, a few thousand waiting, a few running: a plan on a nearly empty table says nothing."""
    repository = postgres_repository
    for name in ("a", "b", "gone"):
        add_node(repository, name)
    p, e = repository.tables.partitions, repository.tables.executions
    for number in range(3):
        old = submit(repository, HISTORY // 3, job=f"old {number}").job_execution_id
        with repository.engine.begin() as connection:
            done = {"status": "COMPLETED", "assigned_node": "a", "is_transferable": number % 2}
            connection.execute(p.update().where(p.c.job_execution_id == old).values(done))
            ended = {"status": "COMPLETED", "active_instance_id": None}
            connection.execute(e.update().where(e.c.job_execution_id == old).values(ended))
    submit(repository, 1000, job="a's", to="a")
    submit(repository, 1000, job="b's", to="b")
    submit(repository, 1000, job="nobody's")
    submit(repository, 20, job="gone's", to="gone")
    claim(repository, "gone", 10)
    remove(repository, "gone")
    age_partitions(repository, 60)
    with repository.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    return repository


@contextmanager
def explained(repository: JobRepository, plans: list[str]) -> Iterator[None]:
    """Collect the plan of every statement that is sent meanwhile and touches partitions, just before it is sent."""

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if many or "batch_partitions" not in statement or statement.startswith("EXPLAIN"):
            return
        *settings, statement = statement.split("; ")  # a statement that is a transaction of its own brings its limits
        cursor.execute("; ".join([*settings, f"EXPLAIN {statement}"]), parameters)
        plans.append("\n".join(row[0] for row in cursor.fetchall()))

    event.listen(repository.engine, "before_cursor_execute", explain)
    try:
        yield
    finally:
        event.remove(repository.engine, "before_cursor_execute", explain)


def settle_one(repository: JobRepository) -> None:
    (taken,) = claim(repository, "a", 1)
    complete(repository, taken)
    repository.executions.finalise(taken.job_execution_id)


HOT: dict[str, tuple[Callable[[JobRepository], object], set[str]]] = {
    "a claim of its own": (lambda repository: claim(repository, "a", 4), {"ix_batch_partitions_own"}),
    "a claim of nobody's": (lambda repository: claim(repository, "b", 1004), {"ix_batch_partitions_free"}),
    "a steal": (
        lambda repository: [
            add_node(repository, "c", node_group="default"),
            *claim(repository, "c", 1000),
            *claim(repository, "c", 4, steal_after_s=1),
        ],
        {"ix_batch_partitions_steal"},
    ),
    "a heartbeat": (
        lambda repository: repository.nodes.heartbeat("a", current_load=1),
        {"ix_batch_partitions_held"},
    ),
    "a settle": (settle_one, {"pk_batch_partitions", "ix_batch_partitions_execution_status"}),
    "a sweep": (sweep, {"ix_batch_partitions_own", "ix_batch_partitions_held", "ix_batch_partitions_execution_status"}),
    "a look for leavings": (
        lambda repository: repository.losses.executions_on("gone"),
        {"ix_batch_partitions_own", "ix_batch_partitions_held"},
    ),
    "a look for unknown owners": (
        lambda repository: repository.losses.unknown_owners(),
        {"ix_batch_partitions_own", "ix_batch_partitions_held"},
    ),
    "a look for what still waits": (
        lambda repository: repository.claims.waiting(node_id="c", node_group="default", steps=["work", "none"]),
        {"ix_batch_partitions_own"},
    ),
    "a look that finds nothing": (
        lambda repository: repository.claims.waiting(node_id="c", node_group="default", steps=["none"]),
        {"ix_batch_partitions_own", "ix_batch_partitions_free", "ix_batch_partitions_steal"},
    ),
    "a purge of nodes": (
        lambda repository: repository.retention.purge(older_than_s=3600),
        {"ix_batch_partitions_own", "ix_batch_partitions_held"},
    ),
}


def test_hot_queries_go_by_their_indexes(full_repository: JobRepository) -> None:
    for name, (act, indexes) in HOT.items():
        plans: list[str] = []
        with explained(full_repository, plans):
            act(full_repository)
        together = f"{name}:\n" + "\n\n".join(plans)
        assert plans, f"{name}: nothing was sent: this test sees nothing"
        assert "Seq Scan on batch_partitions" not in together, together
        assert {index for index in indexes if index not in together} == set(), together
