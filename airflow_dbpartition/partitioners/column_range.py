"""ColumnRangePartitioner: cuts a table by ranges of a column, evenly by value or by the rows that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.partitioners.ranges import Axis, AxisKind, NotOnAxisError, Range, close_gaps, cut_evenly
from airflow_dbpartition.partitioners.source import DatabasePartitioner

if TYPE_CHECKING:
    from sqlalchemy import ColumnClause, Connection, Select


class ColumnRangePartitioner(DatabasePartitioner):
    """Ranges of a column, from its least to its greatest value, each value in exactly one range.

    The context holds `min_value` and `max_value`, **both inclusive** for every type, so that a step writes
    `column BETWEEN min_value AND max_value`: integers for columns of whole numbers, ISO 8601 text for dates and
    timestamps. Timestamps are cut between microseconds, the finest that the databases keep: a range ends one
    microsecond before the next begins. Those with a time zone are given in UTC; the others keep having none. Columns
    of decimals do if no row has a fraction, which is looked for unless the column's scale is 0.

    An empty table has no partitions. There are never more ranges than possible values.

    Args:
        table: the table or view.
        column: what to cut by: whole numbers, dates or timestamps. An index on it makes this fast.
        schema: where the table is, if not in the connection's default schema.
        where: SQL condition on the rows that count. It is not handed to the step, which has to repeat it.
        conn_id: Airflow connection to read from.
        url: SQLAlchemy URL to read from instead. With neither, the job repository's database is read.
        balanced: cut so that the ranges hold about the same number of rows, whatever the gaps and the hot spots; the
            weight is then the number of rows. Reads the whole column once. All rows of one value stay together, so
            that a very frequent value makes one heavy range, and there may be fewer ranges.
        include_nulls: where rows have no value, add a partition `null` with the context
            `{"is_null": true, "min_value": null, "max_value": null}` (the others then say `"is_null": false`).
            By default such rows belong to no partition.
        context: further values for the context of every partition, such as the date that `where` speaks of.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "table",
        "column",
        "schema",
        "where",
        "conn_id",
        "url",
        "balanced",
        "include_nulls",
        "context",
    )

    def __init__(
        self,
        *,
        table: str,
        column: str,
        schema: str | None = None,
        where: str | None = None,
        conn_id: str | None = None,
        url: str | None = None,
        balanced: bool | str = False,
        include_nulls: bool | str = False,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self._required(table=table, column=column)
        self.table = table
        self.column = column
        self.schema = schema
        self.where = where
        self.balanced = balanced
        self.include_nulls = include_nulls
        self.context = context
        self._source(conn_id, url)

    def partition(self, grid_size: int) -> Iterator[Partition]:
        balanced, include_nulls = self._flag("balanced"), self._flag("include_nulls")
        null_rows = 0
        with self._connect() as connection:
            query = _ColumnQuery(self, connection)
            try:
                axis, ranges = query.balanced(grid_size) if balanced else query.even(grid_size)
            except NotOnAxisError as error:
                raise self._error(f"column {self.column!r} of {self.table!r} cannot be cut: {error}") from None
            if include_nulls:
                null_rows = query.count_nulls(exactly=balanced)
        flag: dict[str, Any] = {"is_null": False} if include_nulls else {}
        for index, part in enumerate(ranges):
            limits = {"min_value": axis.json(part.low), "max_value": axis.json(part.high)}
            yield Partition(f"partition{index}", self._context({**flag, **limits}), weight=part.rows)
        if null_rows:
            absent = {"is_null": True, "min_value": None, "max_value": None}
            yield Partition("null", self._context(absent), weight=null_rows)


class _ColumnQuery:
    """The statements about one column, written so that PostgreSQL, MySQL, MariaDB and SQLite all take them."""

    def __init__(self, spec: ColumnRangePartitioner, connection: Connection) -> None:
        from sqlalchemy import and_, column, literal_column, table

        self._connection = connection
        self._name = spec._text("column")
        self._table_name = spec._text("table")
        self._schema = spec._optional_text("schema")
        self._owner = type(spec).__name__
        self._kind, self._may_have_fractions = self._classify(self._reflect())
        # No type: values come as the driver has them, and SQLite's text is read by ranges.py.
        self._column: ColumnClause[Any] = column(self._name)
        self._table = table(self._table_name, self._column, schema=self._schema)
        where = spec._optional_text("where")
        # Not text(): colons in it are no parameters. The line break ends a comment that it may end with.
        condition: list[Any] = [literal_column(f"({where}\n)")] if where else []
        self._present = and_(self._column.is_not(None), *condition)
        self._absent = and_(self._column.is_(None), *condition)

    def even(self, parts: int) -> tuple[Axis, Iterable[Range]]:
        from sqlalchemy import func, select

        least, greatest = self._connection.execute(
            select(func.min(self._column), func.max(self._column)).select_from(self._table).where(self._present)
        ).one()
        if least is None:
            return Axis(self._kind), ()
        axis = self._axis(least, greatest)
        return axis, cut_evenly(axis.number(least), axis.number(greatest), parts)

    def balanced(self, parts: int) -> tuple[Axis, Iterable[Range]]:
        """Give each value to the part where its middle row falls: no value is ever in two parts."""
        from sqlalchemy import BigInteger, cast, func, literal_column, select

        counted = (
            select(self._column.label("val"), func.count().label("freq"))
            .select_from(self._table)
            .where(self._present)
            .group_by(self._column)
            .cte("counted")
        )
        running = select(
            counted.c.val,
            cast(counted.c.freq, BigInteger).label("freq"),
            cast(func.sum(counted.c.freq).over(order_by=counted.c.val), BigInteger).label("upto"),
        ).cte("running")
        total = cast(select(func.sum(counted.c.freq)).scalar_subquery(), BigInteger)
        middle = 2 * running.c.upto - running.c.freq
        part = ((middle * literal_column(str(parts))) // (2 * total)).label("part")
        placed = select(running.c.val, running.c.freq, part).cte("placed")
        low = func.min(placed.c.val)
        rows = self._connection.execute(
            select(low, func.max(placed.c.val), func.sum(placed.c.freq)).group_by(placed.c.part).order_by(low)
        ).all()
        if not rows:
            return Axis(self._kind), ()
        axis = self._axis(rows[0][0], rows[-1][1])
        found = [Range(axis.number(least), axis.number(greatest), int(freq)) for least, greatest, freq in rows]
        return axis, close_gaps(found)

    def count_nulls(self, *, exactly: bool) -> int:
        """How many rows have no value; unless `exactly`, 1 stands for any number."""
        from sqlalchemy import func, literal_column, select

        if exactly:
            counting = select(func.count()).select_from(self._table).where(self._absent)
            return int(self._connection.execute(counting).scalar_one())
        first: Select[Any] = select(literal_column("1")).select_from(self._table).where(self._absent).limit(1)
        return len(self._connection.execute(first).all())

    def _reflect(self) -> Any:
        from sqlalchemy import inspect
        from sqlalchemy.exc import NoSuchTableError

        where = f" in schema {self._schema!r}" if self._schema else ""
        try:
            columns = inspect(self._connection).get_columns(self._table_name, schema=self._schema)
        except NoSuchTableError:
            schema, dot, table = self._table_name.rpartition(".")
            hint = f"; write schema={schema!r}, table={table!r}" if dot and not self._schema else ""
            raise ConfigurationError(
                f"{self._owner}: there is no table {self._table_name!r}{where} that this connection may read{hint}"
            ) from None
        for found in columns:
            if found["name"] == self._name:
                return getattr(found["type"], "data_type", found["type"])  # a domain is cut like its base type
        raise ConfigurationError(
            f"{self._owner}: table {self._table_name!r}{where} has no column {self._name!r}; "
            f"it has {[found['name'] for found in columns]}"
        )

    def _classify(self, declared: Any) -> tuple[AxisKind, bool]:
        from sqlalchemy import types

        if isinstance(declared, types.DateTime):
            return AxisKind.MICROSECOND, False
        if isinstance(declared, types.Date):
            return AxisKind.DAY, False
        if isinstance(declared, types.Integer):
            return AxisKind.INTEGER, False
        if isinstance(declared, types.Numeric) and not isinstance(declared, types.Float):
            return AxisKind.INTEGER, declared.scale != 0
        raise ConfigurationError(
            f"{self._owner}: column {self._name!r} of {self._table_name!r} is {declared}, which has no ranges of whole "
            "steps; take a column of integers, dates or timestamps, or write the ranges as a query (QueryPartitioner) "
            "or a list (ListPartitioner)"
        )

    def _axis(self, *samples: Any) -> Axis:
        if self._may_have_fractions:
            self._refuse_fractions()
        return Axis.of(self._kind, *samples)

    def _refuse_fractions(self) -> None:
        """A fraction between two ranges would be in neither, so none may exist."""
        from sqlalchemy import func, select

        fraction = (
            select(self._column)
            .select_from(self._table)
            .where(self._present, func.round(self._column) != self._column)
            .limit(1)
        )
        for (value,) in self._connection.execute(fraction):
            raise NotOnAxisError(f"{value} is not a whole number")
