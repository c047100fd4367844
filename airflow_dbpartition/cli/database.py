"""`dbpartition db`: create, migrate, compare and print the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from airflow_dbpartition.cli.options import AsJson, DatabaseUrl, Schema, UsageError, database_config, usage_errors
from airflow_dbpartition.cli.output import print_json
from airflow_dbpartition.dialects import UPGRADE_HINT, make_engine
from airflow_dbpartition.revision import head_revision, require_current

db = typer.Typer(no_args_is_help=True, help="The job repository's schema.")


def add_to(app: typer.Typer) -> None:
    app.add_typer(db, name="db")


@db.command()
def upgrade(database_url: DatabaseUrl = "", schema: Schema = "", as_json: AsJson = False) -> None:
    """Create the tables, or bring them to this version."""
    config = database_config(database_url, schema)
    with usage_errors():
        engine = make_engine(config)
    from airflow_dbpartition import migrations  # and Alembic, which no other command needs

    before, now = migrations.upgrade(engine, config.schema)
    if as_json:
        print_json({"before": before, "now": now})
    elif before == now:
        typer.echo(f"the job repository is at revision {now} already")
    else:
        typer.echo(f"the job repository went from {before or 'nothing'} to revision {now}")


@db.command()
def check(database_url: DatabaseUrl = "", schema: Schema = "", as_json: AsJson = False) -> int:
    """Compare the database with what this version needs; exit 1 where they differ."""
    config = database_config(database_url, schema)
    with usage_errors():
        engine = make_engine(config)
    require_current(engine, config.schema)
    from airflow_dbpartition import migrations

    found = migrations.differences(engine, config.schema)
    if as_json:
        print_json({"revision": head_revision(), "differences": found})
    elif found:
        for line in found:
            typer.echo(line)
        typer.echo(f"the schema differs from revision {head_revision()}: {UPGRADE_HINT}, or undo the change")
    else:
        typer.echo(f"the schema is as revision {head_revision()} wants it")
    return 1 if found else 0


@db.command()
def sql(
    dialect: Annotated[str, typer.Option("--dialect", help="postgresql, mysql or sqlite.")] = "postgresql",
    schema: Schema = "",
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Write schema.sql, views.sql and grants.sql there.")
    ] = None,
) -> None:
    """Print the schema, views and grants as SQL, for people who apply DDL with their own tools."""
    from airflow_dbpartition import migrations

    with usage_errors():
        files = migrations.print_sql(dialect, schema or None)
    if directory is None:
        typer.echo("\n".join(files.values()), nl=False)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to --directory {directory}: {error}") from None
