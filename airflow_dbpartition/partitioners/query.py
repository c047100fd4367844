"""QueryPartitioner: one partition for each row that a query returns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.errors import InvalidPartitionError
from airflow_dbpartition.partitioners.base import to_json_value
from airflow_dbpartition.partitioners.source import DatabasePartitioner

if TYPE_CHECKING:
    from sqlalchemy import CursorResult

_ROWS_AT_ONCE = 1000
_BIND_NAME = re.compile(r"(?<![:\w\\]):(?=\w)")


class QueryPartitioner(DatabasePartitioner):
    """One partition for each row; the row's columns are its execution context.

    Dates and times become ISO 8601 text, UUIDs text, Decimals without decimal places integers and others text.

    Args:
        sql: the query. With `parameters`, `:name` stands for one of them.
        key: the column that names the partition, unique in the result; the first column by default.
        weight: a column that says how heavy the partition is; it stays in the context.
        parameters: values for the query.
        conn_id: Airflow connection to read from.
        url: SQLAlchemy URL to read from instead. With neither, the job repository's database is read.
    """

    template_fields: ClassVar[Sequence[str]] = ("sql", "key", "weight", "parameters", "conn_id", "url")

    def __init__(
        self,
        sql: str,
        *,
        key: str | None = None,
        weight: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        conn_id: str | None = None,
        url: str | None = None,
    ) -> None:
        self._required(sql=sql)
        self.sql = sql
        self.key = key
        self.weight = weight
        self.parameters = parameters
        self._source(conn_id, url)

    def partition(self, grid_size: int) -> Iterator[Partition]:  # noqa: ARG002
        from sqlalchemy import text

        sql = self._text("sql")
        parameters = self.parameters or {}
        if not isinstance(parameters, Mapping):
            raise self._error(f"expected parameters to be a dict, got {parameters!r}")
        if not parameters:
            sql = _BIND_NAME.sub(r"\\:", sql)  # without parameters a colon is only a colon
        with self._connect() as connection:
            streamed = connection.execution_options(yield_per=_ROWS_AT_ONCE)
            result = streamed.execute(text(sql), dict(parameters))
            yield from self._partitions(result)

    def _partitions(self, result: CursorResult[Any]) -> Iterator[Partition]:
        if not result.returns_rows:
            raise self._error("expected sql to return rows (a SELECT); whatever it did has been rolled back")
        names = list(result.keys())
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise self._error(f"the query returns {twice} more than once; give each column its own alias")
        key = self._optional_text("key") or names[0]
        weight = self._optional_text("weight")
        for option, name in (("key", key), ("weight", weight)):
            if name is not None and name not in names:
                raise self._error(f"{option} column {name!r} is not in the result; it has {names}")
        for number, values in enumerate(result, start=1):
            row = {name: to_json_value(value) for name, value in zip(names, values, strict=True)}
            yield Partition(self._key(row[key], key, number), row, self._weight(row, weight, key))

    def _key(self, value: Any, column: str, row_number: int) -> str:
        if value is None or isinstance(value, (list, dict)) or not str(value).strip():
            raise InvalidPartitionError(
                f"QueryPartitioner: row {row_number} has {value!r} in its key column {column!r}, which cannot name a "
                "partition; leave such rows out of the query, or give another key="
            )
        return str(value).strip()

    def _weight(self, row: dict[str, Any], column: str | None, key: str) -> float:
        if column is None:
            return 1.0
        value = row[column]
        try:
            return float(value)
        except (TypeError, ValueError):
            raise InvalidPartitionError(
                f"QueryPartitioner: partition {row[key]!r} has {value!r} in its weight column {column!r}, expected a "
                "number; use COALESCE in the query"
            ) from None
