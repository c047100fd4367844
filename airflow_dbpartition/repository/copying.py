"""COPY: many rows written to PostgreSQL as fast as it takes them, made while it does."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain, islice
from typing import Any

from sqlalchemy import ColumnElement, Table, select
from sqlalchemy.engine import Connection

from airflow_dbpartition.dialects import COPIED_BY
from airflow_dbpartition.storable import JsonText, dump_json

# Few enough for one statement to be far from its time limit.
ROWS_A_STATEMENT = 20_000
# So little that the server is at work while the next rows are made.
CHARS_A_READ = 16_384


def copy_rows(
    connection: Connection, table: Table, of_all: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Append rows to a table of PostgreSQL, in the connection's transaction.

    Args:
        of_all: the columns that are the same in each row: values, or expressions that are evaluated once.
        rows: column -> value (text, number, mapping for JSON, aware datetime, None); all with the same columns in
            the same order; taken some at a time.
    """
    prepare = connection.dialect.identifier_preparer
    beginning = "".join(f"{_field(value)}\t" for value in _evaluated(connection, of_all))
    left = iter(rows)
    for first in left:
        names = ", ".join(prepare.quote(name) for name in (*of_all, *first))
        batch = chain([first], islice(left, ROWS_A_STATEMENT - 1))
        lines = (beginning + "\t".join(map(_field, row.values())) + "\n" for row in batch)
        connection.exec_driver_sql(
            f"COPY {prepare.format_table(table)} ({names}) FROM STDIN", execution_options={COPIED_BY: _Text(lines).copy}
        )


def _evaluated(connection: Connection, values: Mapping[str, Any]) -> list[Any]:
    expressions = [value.label(name) for name, value in values.items() if isinstance(value, ColumnElement)]
    known: dict[str, Any] = dict(values)
    if expressions:
        known.update(connection.execute(select(*expressions)).mappings().one())
    return list(known.values())


def _field(value: object) -> str:
    """A value in COPY's text format (PostgreSQL's manual, COPY, "Text Format")."""
    if isinstance(value, str):
        return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    if value is None:
        return "\\N"
    if isinstance(value, Mapping):
        text = value.text if isinstance(value, JsonText) else dump_json(value)
        return text.replace("\\", "\\\\")  # JSON has no other character that would need it
    return value.isoformat() if isinstance(value, datetime) else repr(value)


class _Text(io.TextIOBase):
    """Text that is made while it is read."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._error: BaseException | None = None

    def copy(self, cursor: Any, statement: str) -> None:
        """Execute the COPY with this as its input; what ends it from within is raised as it is."""
        try:
            cursor.copy_expert(statement, self)
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise

    def read(self, _size: int | None = -1) -> str:
        try:
            lines: list[str] = []
            chars = 0
            for line in self._lines:
                lines.append(line)
                chars += len(line)
                if chars >= CHARS_A_READ:
                    break
            return "".join(lines)
        except BaseException as error:  # a signal's, mostly; psycopg2 would make a database error of it
            self._error = error
            raise
