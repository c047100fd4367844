"""Options that commands share, each with its environment variable, and how they become settings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.repository import JobRepository

DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="DBPARTITION_DATABASE_URL",
        show_envvar=True,
        show_default=False,
        help="The job repository: postgresql://user:password@host/database, mysql://… or sqlite:///file.",
    ),
]
Schema = Annotated[
    str,
    typer.Option(
        "--schema",
        envvar="DBPARTITION_SCHEMA",
        help="Database schema of the tables; empty = the connection's own.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]

TIMES = Timings()
Heartbeat = Annotated[float, typer.Option(envvar="DBPARTITION_HEARTBEAT", help="Seconds between heartbeats.")]
UnreachableAfter = Annotated[
    float, typer.Option(envvar="DBPARTITION_UNREACHABLE_AFTER", help="Seconds of silence: no new work.")
]
RemoveAfter = Annotated[
    float, typer.Option(envvar="DBPARTITION_REMOVE_AFTER", help="Seconds of silence: removed, work re-placed.")
]

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class UsageError(ConfigurationError):
    """What was typed cannot be done: exit code 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Inside, a wrong setting is the caller's: exit code 2."""
    try:
        yield
    except ConfigurationError as error:
        raise UsageError(str(error)) from error


def database_config(url: str, schema: str) -> DatabaseConfig:
    with usage_errors():
        return DatabaseConfig(url=url, schema=schema or None)


@contextlib.contextmanager
def open_repository(url: str, schema: str) -> Iterator[JobRepository]:
    """The job repository, checked to be there and current; closed afterwards."""
    config = database_config(url, schema)
    with usage_errors():
        repository = JobRepository.connect(config)
    try:
        migrations.require_current(repository.engine, config.schema)
        yield repository
    finally:
        repository.close()


def seconds(text: str, option: str) -> float:
    """Read a duration: a number of seconds, or a number with s, m, h, d or w."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", text)
    if match is None:
        raise UsageError(f"expected {option} to be a duration such as 90s, 12h or 30d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]
