"""`dbpartition demo`: the whole thing on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    keep: Annotated[bool, typer.Option("--keep", envvar="KEEP", help="Leave everything running until Ctrl-C.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Where data and logs go; default: a temporary one, removed when all went well.")
    ] = None,
) -> int:
    """Run a real partitioned job through real Airflow, on an embedded PostgreSQL, and kill a worker on the way."""
    from airflow_dbpartition.demo.run import run_demo

    return run_demo(keep=keep, directory=directory.resolve() if directory else None)
