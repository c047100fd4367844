"""Printing data: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, indent=2, default=str))


def print_rows(rows: Sequence[dict[str, Any]], *, as_json: bool, empty: str) -> None:
    """A list of like rows."""
    if as_json:
        print_json(list(rows))
        return
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(
            name.replace("_", " "), justify="right" if _is_number(rows[0][name]) else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*("" if value is None else _cell(value) for value in row.values()))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)  # a pipe has no edge to wrap at
    console.print(table)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)
