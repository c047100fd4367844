"""Which revision of the schema this package is written for, and whether the database has it; without Alembic."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import column, table

from airflow_dbpartition.dialects import UPGRADE_HINT, explain, is_missing_table
from airflow_dbpartition.errors import SchemaError
from airflow_dbpartition.schema import VERSION_TABLE

REVISIONS = ("0001",)  # oldest first; what migrations/versions has


def head_revision() -> str:
    """The revision that this package is written for."""
    return REVISIONS[-1]


def current_revision(connection: Connection, schema: str | None) -> str | None:
    """The revision of the database, None where there are no tables of ours."""
    versions = table(VERSION_TABLE, column("version_num"), schema=schema)
    try:
        with connection.begin_nested():  # PostgreSQL takes no more statements after one that failed
            found = connection.execute(select(versions.c.version_num)).scalar()
    except SQLAlchemyError as error:
        if is_missing_table(error):
            return None
        raise
    return None if found is None else str(found)


def newer(found: str) -> SchemaError:
    """The error for a database that is at a revision which this package does not know."""
    return SchemaError(
        f"the job repository is at revision {found}, which this version (revision {head_revision()}) does not know: "
        "install the airflow-dbpartition that migrated it, or a newer one"
    )


def require_current(engine: Engine, schema: str | None = None) -> None:
    """One cheap look before work starts.

    Raises:
        SchemaError: missing, older or unknown schema, in one line with the command that mends it.
        DatabaseError: the database cannot be reached.
    """
    place = engine.url.render_as_string(hide_password=True)
    where = f"{place}, schema {schema!r}" if schema else place
    try:
        with engine.connect() as connection:
            found = current_revision(connection, schema)
    except SQLAlchemyError as error:
        raise explain(error, engine) from error
    head = head_revision()
    if found == head:
        return
    if found is None:
        raise SchemaError(f"the job repository's tables are missing in {where}: {UPGRADE_HINT}")
    if found not in REVISIONS:
        raise newer(found)
    raise SchemaError(
        f"the job repository in {where} is at revision {found}, this version needs {head}: {UPGRADE_HINT}"
    )
