"""Creating, upgrading, checking and printing the schema, with Alembic under a version table of our own name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import UniqueConstraint, create_mock_engine, inspect, text
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection, Dialect, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex

from airflow_dbpartition.dialects import explain
from airflow_dbpartition.errors import ConfigurationError, SchemaError
from airflow_dbpartition.revision import REVISIONS, current_revision, head_revision, newer
from airflow_dbpartition.schema import VERSION_TABLE, Tables, build_tables
from airflow_dbpartition.views import VIEW_NAMES, create_views_sql, drop_views_sql

# "Context impl …" at each check of the schema is no news for anybody's task log.
logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)

_LOCK_KEY = 0x6462_7061_7274  # "dbpart"
_LOCK_WAIT_S = 20  # less than a statement may take


def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    return ScriptDirectory.from_config(config)


def _context_options(schema: str | None) -> dict[str, Any]:
    return {"version_table": VERSION_TABLE, "version_table_schema": schema}


def upgrade(engine: Engine, schema: str | None = None) -> tuple[str | None, str]:
    """Create the tables or bring them to this package's revision. Safe to run twice, and twice at once.

    Returns:
        The revision before (None = there was nothing) and the one now.

    Raises:
        SchemaError: the database is newer than this package, or refuses.
        DatabaseError: it cannot be reached.
    """
    scripts = _scripts()
    head = head_revision()
    tables = build_tables(schema)
    try:
        with engine.begin() as connection, _one_at_a_time(connection):
            if schema and engine.dialect.name == "postgresql":
                quoted = engine.dialect.identifier_preparer.quote(schema)
                connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {quoted}"))
            before = current_revision(connection, schema)
            if before is not None and before not in REVISIONS:
                raise newer(before)
            if before == head and not _missing_views(connection, schema):
                return before, head  # recreating the views would drop the grants on them
            for statement in drop_views_sql(tables, engine.dialect):
                connection.exec_driver_sql(statement)

            def steps(revision: Any, _context: Any) -> Any:
                return scripts._upgrade_revs(head, revision)

            with EnvironmentContext(Config(), scripts, fn=steps) as environment:
                environment.configure(
                    connection=connection,
                    target_metadata=tables.metadata,
                    transaction_per_migration=False,
                    schema=schema,
                    **_context_options(schema),
                )
                environment.run_migrations(schema=schema)
            for statement in create_views_sql(tables, engine.dialect):
                connection.exec_driver_sql(statement.replace("%", "%%") if _formats(engine.dialect) else statement)
    except SQLAlchemyError as error:
        raise explain(error, engine) from error
    return before, head


def _formats(dialect: Dialect) -> bool:
    return dialect.paramstyle in ("format", "pyformat")


@contextmanager
def _one_at_a_time(connection: Connection) -> Iterator[None]:
    """Two upgrades at once take turns; on SQLite the transaction is lock enough."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
    if connection.dialect.name not in ("mysql", "mariadb"):
        yield
        return
    # DDL commits, so the lock must outlive transactions: it is the session's, and one for each database.
    lock = {"lock": "dbpartition " + hashlib.sha256(str(connection.engine.url.database).encode()).hexdigest()[:32]}
    if connection.execute(text("SELECT GET_LOCK(:lock, :seconds)"), {**lock, "seconds": _LOCK_WAIT_S}).scalar() != 1:
        raise SchemaError(f"another upgrade has been running for {_LOCK_WAIT_S} s: wait for its end, then try again")
    try:
        yield
    finally:
        with suppress(SQLAlchemyError):  # a connection that broke has let go of it already
            connection.execute(text("DO RELEASE_LOCK(:lock)"), lock)


def differences(engine: Engine, schema: str | None = None) -> list[str]:
    """Everything in which the database differs from the schema that this package is written for."""
    tables = build_tables(schema)
    names = {table.name for table in tables.all}

    def ours(_object: Any, name: str | None, kind: str, _reflected: bool, _other: Any) -> bool:
        return name in names if kind == "table" else kind == "column"

    def in_schema(name: str | None, kind: str, _parents: Any) -> bool:
        return kind != "schema" or name == schema

    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection,
                opts={
                    **_context_options(schema),
                    "include_object": ours,
                    "include_name": in_schema,
                    "include_schemas": schema is not None,
                    "target_metadata": tables.metadata,
                },
            )
            found = [_describe(item) for item in compare_metadata(context, tables.metadata)]
            found += _missing_indexes(connection, tables)
            missing = _missing_views(connection, schema)
    except SQLAlchemyError as error:
        raise explain(error, engine) from error
    return found + [f"missing view {name}" for name in sorted(missing)]


def _missing_indexes(connection: Connection, tables: Tables) -> list[str]:
    """Indexes and unique constraints by name: Alembic does not know which of ours are for which database."""
    name = "mysql" if connection.dialect.name == "mariadb" else connection.dialect.name
    indexes = [statement.element for statement in _creation(tables, name) if isinstance(statement, CreateIndex)]
    inspector = inspect(connection)
    missing: list[str] = []
    for table in tables.all:
        if not inspector.has_table(table.name, schema=table.schema):
            continue
        wanted = {str(index.name) for index in indexes if index.table is table}
        wanted |= {str(constraint.name) for constraint in table.constraints if isinstance(constraint, UniqueConstraint)}
        found = (
            inspector.get_indexes(table.name, table.schema),
            inspector.get_unique_constraints(table.name, table.schema),
        )
        present = {item["name"] for items in found for item in items}
        missing += [f"missing index {table.name}.{index}" for index in sorted(wanted - present)]
    return missing


def _missing_views(connection: Connection, schema: str | None) -> set[str]:
    return set(VIEW_NAMES) - set(inspect(connection).get_view_names(schema=schema))


def _describe(difference: Any) -> str:
    items = difference if isinstance(difference, list) else [difference]
    words = []
    for item in items:
        kind, subject = item[0], item[-1]
        name = getattr(subject, "name", subject)
        table = item[2] if kind.endswith("_column") and len(item) > 3 else ""
        words.append(f"{kind.replace('_', ' ')} {f'{table}.' if table else ''}{name}")
    return "; ".join(words)


DIALECTS: dict[str, Any] = {"postgresql": postgresql.dialect, "mysql": mysql.dialect, "sqlite": sqlite.dialect}


def print_sql(dialect_name: str, schema: str | None = None) -> dict[str, str]:
    """The schema as DDL text for people who apply it with their own tools: {"schema.sql": …, "views.sql": …}.

    Raises:
        ConfigurationError: for a dialect that is not supported.
    """
    name = "mysql" if dialect_name == "mariadb" else dialect_name
    if name not in DIALECTS:
        raise ConfigurationError(f"expected --dialect to be one of {', '.join(DIALECTS)}, got {dialect_name!r}")
    dialect: Dialect = DIALECTS[name]()
    tables = build_tables(schema)
    quote = dialect.identifier_preparer.quote
    prefix = f"{quote(schema)}." if schema else ""
    parts: list[str] = []
    if schema and name == "postgresql":
        parts.append(f"CREATE SCHEMA IF NOT EXISTS {quote(schema)}")

    parts += [str(statement.compile(dialect=dialect)) for statement in _creation(tables, name)]
    parts.append(f"CREATE TABLE {prefix}{VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    parts.append(f"INSERT INTO {prefix}{VERSION_TABLE} (version_num) VALUES ('{head_revision()}')")
    header = f"-- {name}: printed by `dbpartition db sql --dialect {name}`; do not edit.\n"
    files = {
        "schema.sql": header + _script(parts),
        "views.sql": header + _script(drop_views_sql(tables, dialect) + create_views_sql(tables, dialect)),
    }
    if name != "sqlite":
        from airflow_dbpartition.grants import grants_sql

        files["grants.sql"] = header + _script(grants_sql(tables, dialect))
    return files


def _creation(tables: Tables, dialect_name: str) -> list[Any]:
    """The statements that make the tables and their indexes on this kind of database."""
    statements: list[Any] = []
    engine = create_mock_engine(f"{dialect_name}://", lambda statement, *_, **__: statements.append(statement))
    tables.metadata.create_all(engine, checkfirst=False)
    ordered: list[Any] = []
    # A table's indexes are a set: without an order of ours each run would print them in another.
    for is_index, group in groupby(statements, lambda statement: isinstance(statement, CreateIndex)):
        some = list(group)
        if is_index:
            some.sort(key=lambda statement: str(statement.element.name))
        ordered += some
    return ordered


def _script(statements: list[str]) -> str:
    lines = [line.rstrip() for statement in statements for line in (statement.strip() + ";\n").splitlines()]
    return "\n".join(line.replace("\t", "    ") for line in lines) + "\n"
