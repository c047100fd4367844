"""Options that commands share, each with its environment variable, and how they become settings."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.errors import ConfigurationError

if TYPE_CHECKING:  # a worker's options are read without SQLAlchemy
    from airflow_dbpartition.repository import JobRepository

# typer has no public name for this, and has brought its own copy of click since 0.20 or so.
_CLICK: Any = importlib.import_module(typer.Context.__mro__[1].__module__.rpartition(".")[0] + ".globals")

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

# What the columns hold: a larger number is refused here rather than by the database.
LARGEST_INT = 2**31 - 1
LARGEST_ID = 2**63 - 1

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LONGEST_DAYS = 36500  # further back than that a database's calendar may have no date


@dataclass(frozen=True)
class OwnProcess:
    """What a command finds in its context where the whole process was started for it."""

    verbose: bool


def own_process() -> OwnProcess | None:
    """None where a command was called inside a process that has other things to do."""
    context = _CLICK.get_current_context(silent=True)
    return None if context is None else context.find_object(OwnProcess)


class UsageError(ConfigurationError):
    """What was typed cannot be done: exit code 2."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Inside, a wrong setting is the caller's: exit code 2."""
    try:
        yield
    except ConfigurationError as error:
        raise UsageError(str(error) + from_the_environment(str(error))) from error


def from_the_environment(message: str) -> str:
    """The variables that an error speaks of: nobody looks for what was not typed."""
    context = _CLICK.get_current_context(silent=True)
    if context is None:
        return ""
    named = [
        parameter.envvar
        for parameter in context.command.params
        if parameter.envvar
        and re.search(rf"(?i)\b{parameter.name.replace('_', '[_ -]')}(_s)?\b", message)
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT"
    ]
    return f" (from {', '.join(named)})" if named else ""


def database_config(url: str, schema: str) -> DatabaseConfig:
    from airflow_dbpartition.dialects import normalise_url

    with usage_errors():
        config = DatabaseConfig(url=url, schema=schema or None)
        normalise_url(config.url)
        return config


@contextlib.contextmanager
def open_repository(url: str, schema: str) -> Iterator[JobRepository]:
    """The job repository, checked to be there and current; closed afterwards."""
    from airflow_dbpartition.repository import JobRepository
    from airflow_dbpartition.revision import require_current

    config = database_config(url, schema)
    with usage_errors():
        repository = JobRepository.connect(config)
    try:
        require_current(repository.engine, config.schema)
        yield repository
    finally:
        repository.close()


def seconds(text: str, option: str) -> float:
    """Read a duration: a number with s, m, h, d or w. Without a unit, somebody who means 30 days would get 30 s."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise UsageError(f"expected {option} to be a duration such as 90s, 12h or 30d, got {text!r}")
    found = float(match[1]) * _UNITS[match[2]]
    if found > _LONGEST_DAYS * _UNITS["d"]:
        raise UsageError(f"expected {option} to be at most {_LONGEST_DAYS}d, got {text!r}")
    return found
