"""The least that each kind of process needs, as GRANT statements."""

from __future__ import annotations

from sqlalchemy.engine import Dialect

from airflow_dbpartition.schema import VERSION_TABLE, Tables
from airflow_dbpartition.views import VIEW_NAMES

# What each role may do to each table. Neither a worker nor a manager creates tables; only retention deletes.
_RIGHTS: dict[str, dict[str, str]] = {
    "dbpartition_worker": {
        "batch_nodes": "SELECT, INSERT, UPDATE",
        "batch_job_instances": "SELECT",
        "batch_job_executions": "SELECT, UPDATE",
        "batch_partitions": "SELECT, UPDATE",
        "batch_partition_events": "SELECT, INSERT",
    },
    "dbpartition_manager": {
        "batch_nodes": "SELECT, UPDATE",
        "batch_job_instances": "SELECT, INSERT",
        "batch_job_executions": "SELECT, INSERT, UPDATE",
        "batch_partitions": "SELECT, INSERT, UPDATE",
        "batch_partition_events": "SELECT, INSERT",
    },
    "dbpartition_reader": {
        "batch_nodes": "SELECT",
        "batch_job_instances": "SELECT",
        "batch_job_executions": "SELECT",
        "batch_partitions": "SELECT",
        "batch_partition_events": "SELECT",
    },
    "dbpartition_retention": {
        "batch_nodes": "SELECT, DELETE",
        "batch_job_instances": "SELECT, DELETE",
        "batch_job_executions": "SELECT, UPDATE, DELETE",  # UPDATE, since it locks them
        "batch_partitions": "SELECT, DELETE",
        "batch_partition_events": "SELECT, DELETE",
    },
}
ROLES = tuple(_RIGHTS)


def grants_sql(tables: Tables, dialect: Dialect) -> list[str]:
    """Statements that create the four roles (no login, no password) and give each its rights."""
    quote = dialect.identifier_preparer.quote
    schema = tables.metadata.schema
    prefix = f"{quote(schema)}." if schema else ""
    statements = []
    for role, rights in _RIGHTS.items():
        if dialect.name == "postgresql":
            statements.append(
                f"DO $$ BEGIN CREATE ROLE {role} NOLOGIN; "
                "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            )
            if schema:
                statements.append(f"GRANT USAGE ON SCHEMA {quote(schema)} TO {role}")
        else:
            statements.append(f"CREATE ROLE IF NOT EXISTS {role}")
        statements += [f"GRANT {words} ON {prefix}{table} TO {role}" for table, words in rights.items()]
        statements += [f"GRANT SELECT ON {prefix}{name} TO {role}" for name in (*VIEW_NAMES, VERSION_TABLE)]
        if dialect.name == "postgresql":
            for table, words in rights.items():
                if "INSERT" in words and table != "batch_nodes":
                    key = next(iter(tables.metadata.tables[_key(schema, table)].primary_key)).name
                    statements.append(f"GRANT USAGE ON SEQUENCE {prefix}{table}_{key}_seq TO {role}")
    return statements


def _key(schema: str | None, table: str) -> str:
    return f"{schema}.{table}" if schema else table
