"""Partitioners that read a database, on every database that is supported."""

from __future__ import annotations

import random
import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    Column,
    Date,
    Engine,
    Float,
    MetaData,
    Numeric,
    SmallInteger,
    String,
    Table,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.mysql import DATETIME as MYSQL_DATETIME
from sqlalchemy.types import DateTime

from airflow_dbpartition.errors import ConfigurationError, DatabaseError
from airflow_dbpartition.partitioners import (
    ColumnRangePartitioner,
    Partition,
    QueryPartitioner,
    StandaloneEnvironment,
    collect_partitions,
)
from airflow_dbpartition.repository import JobRepository

metadata = MetaData()
# The names need quoting, and would be folded to another case without it.
trips = Table(
    "Odd Trips",
    metadata,
    Column("Trip%Id", BigInteger),
    Column("order", SmallInteger),
    Column("day", Date),
    Column("left_at", DateTime().with_variant(MYSQL_DATETIME(fsp=6), "mysql", "mariadb")),
    Column("seen_at", TIMESTAMP(timezone=True), nullable=True),
    Column("whole", Numeric(20, 0)),
    Column("amount", Numeric(20, 2)),
    Column("ratio", Float),
    Column("carrier", String(20)),
)


@pytest.fixture
def database(engine: Engine) -> Engine:
    metadata.create_all(engine)
    return engine


def fill(engine: Engine, column: str, values: list[Any]) -> None:
    with engine.begin() as connection:
        connection.execute(insert(trips), [{column: value} for value in values])


def quoted(engine: Engine, name: str) -> str:
    return engine.dialect.identifier_preparer.quote(name).replace("%%", "%")


def cut(engine: Engine, column: str, grid_size: int, **options: Any) -> list[Partition]:
    partitioner = ColumnRangePartitioner(table="Odd Trips", column=column, **options)
    return collect_partitions(partitioner, grid_size=grid_size, environment=StandaloneEnvironment(engine))


def rows_between(engine: Engine, column: str, partition: Partition, read: Any = lambda value: value) -> int:
    low, high = read(partition.context["min_value"]), read(partition.context["max_value"])
    counting = select(func.count()).select_from(trips).where(trips.c[column].between(low, high))
    with engine.connect() as connection:
        return int(connection.execute(counting).scalar_one())


NUMBERS = random.Random(7)
DAYS = [date(2020, 2, 27) + timedelta(days=NUMBERS.randrange(400)) for _ in range(60)]
MOMENTS = [datetime(2020, 2, 27) + timedelta(microseconds=NUMBERS.randrange(10**13)) for _ in range(60)]
SECONDS = [moment.replace(microsecond=0, tzinfo=timezone.utc) for moment in MOMENTS]

COLUMNS: list[Any] = [
    pytest.param("Trip%Id", [NUMBERS.randrange(-(10**18), 10**18) for _ in range(60)], int, id="bigint"),
    pytest.param("order", [NUMBERS.randrange(-30, 30) for _ in range(60)], int, id="smallint"),
    pytest.param("day", DAYS, date.fromisoformat, id="date"),
    pytest.param("left_at", MOMENTS, datetime.fromisoformat, id="timestamp"),
    pytest.param("seen_at", SECONDS, datetime.fromisoformat, id="timestamptz"),
    pytest.param("whole", [Decimal(NUMBERS.randrange(10**9)) for _ in range(60)], Decimal, id="numeric"),
    pytest.param("amount", [Decimal(NUMBERS.randrange(10**9)) for _ in range(60)], Decimal, id="numeric-with-scale"),
]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("column", "values", "read"), COLUMNS)
def test_every_row_is_between_the_limits_of_exactly_one_partition(
    database: Engine, column: str, values: list[Any], read: Any, balanced: bool
) -> None:
    fill(database, column, [*values, None])
    partitions = cut(database, column, 7, balanced=balanced)
    held = [rows_between(database, column, partition, read) for partition in partitions]
    assert 1 < len(partitions) <= 7
    assert sum(held) == len(values)
    if balanced:
        assert held == [partition.weight for partition in partitions]
    else:
        assert {partition.weight for partition in partitions} == {1.0}


def test_balanced_ranges_hold_about_the_same_number_of_rows(database: Engine) -> None:
    fill(database, "Trip%Id", [item**7 for item in range(100)])
    weights = [partition.weight for partition in cut(database, "Trip%Id", 8, balanced=True)]
    assert (len(weights), sum(weights), set(weights)) == (8, 100, {12, 13})


def test_a_hot_value_is_alone_in_its_range(database: Engine) -> None:
    fill(database, "order", [1, 2, 3, *[5] * 90, 6, 7, 8])
    partitions = cut(database, "order", 10, balanced=True)
    assert [(p.context["min_value"], p.context["max_value"], p.weight) for p in partitions] == [
        (1, 4, 3),
        (5, 5, 90),
        (6, 8, 3),
    ]


def test_the_limits_of_a_bigint_are_cut(database: Engine) -> None:
    fill(database, "Trip%Id", [-(2**63), 2**63 - 1])
    for balanced in (False, True):
        partitions = cut(database, "Trip%Id", 2, balanced=balanced)
        assert partitions[0].context["min_value"] == -(2**63)
        assert partitions[1].context["max_value"] == 2**63 - 1
        assert partitions[0].context["max_value"] + 1 == partitions[1].context["min_value"]


def test_where_is_taken_as_it_is_written(database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(
            insert(trips), [{"order": item, "carrier": " :AA" if item < 5 else "UA"} for item in range(10)]
        )
    for balanced in (False, True):
        found = cut(database, "order", 1, where="carrier LIKE ' :A%' -- only these", balanced=balanced)
        assert [dict(partition.context) for partition in found] == [{"min_value": 0, "max_value": 4}]


@pytest.mark.parametrize("balanced", [False, True])
def test_rows_without_a_value_are_a_partition_when_asked_for(database: Engine, balanced: bool) -> None:
    fill(database, "day", [None, None])
    assert cut(database, "day", 3, balanced=balanced) == []
    (nulls,) = cut(database, "day", 3, balanced=balanced, include_nulls=True)
    assert (nulls.key, nulls.weight) == ("null", 2.0 if balanced else 1.0)


@pytest.mark.parametrize("balanced", [False, True])
def test_a_fraction_anywhere_in_the_column_is_refused(database: Engine, balanced: bool) -> None:
    fill(database, "amount", [1, Decimal("2.5"), 10])
    with pytest.raises(
        ConfigurationError, match=r"column 'amount' of 'Odd Trips' cannot be cut: 2\.50?0* is not a whole"
    ):
        cut(database, "amount", 2, balanced=balanced)


@pytest.mark.parametrize("column", ["ratio", "carrier"])
def test_a_column_without_whole_steps_is_refused(database: Engine, column: str) -> None:
    with pytest.raises(ConfigurationError, match=f"column '{column}' of 'Odd Trips' is .*QueryPartitioner"):
        cut(database, column, 2)


def test_a_missing_table_or_schema_or_column_is_named(database: Engine) -> None:
    with pytest.raises(ConfigurationError, match="no table 'odd_trips'"):
        collect_partitions(
            ColumnRangePartitioner(table="odd_trips", column="day"),
            grid_size=1,
            environment=StandaloneEnvironment(database),
        )
    with pytest.raises(ConfigurationError, match=r"has no column 'Day'; it has \['Trip%Id', 'order', 'day'"):
        cut(database, "Day", 1)


def test_a_view_is_cut_like_a_table(database: Engine) -> None:
    fill(database, "order", [3, 4])
    with database.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE VIEW few_trips AS SELECT {quoted(database, 'order')} AS place FROM {quoted(database, 'Odd Trips')}"
        )
    try:
        partitions = collect_partitions(
            ColumnRangePartitioner(table="few_trips", column="place"),
            grid_size=1,
            environment=StandaloneEnvironment(database),
        )
        assert [dict(partition.context) for partition in partitions] == [{"min_value": 3, "max_value": 4}]
    finally:
        with database.begin() as connection:
            connection.exec_driver_sql("DROP VIEW few_trips")


def ask(engine: Engine, sql: str, **options: Any) -> list[Partition]:
    return collect_partitions(QueryPartitioner(sql, **options), grid_size=1, environment=StandaloneEnvironment(engine))


def test_a_query_that_names_no_database_reads_the_job_repositorys(repository: JobRepository) -> None:
    assert [p.key for p in ask(repository.engine, "SELECT 'a' AS name UNION SELECT 'b' ORDER BY 1")] == ["a", "b"]


def test_a_query_makes_a_partition_of_each_row(database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(
            insert(trips),
            [
                {"carrier": carrier, "order": number, "day": date(2024, 1, number), "whole": number, "ratio": 0.5}
                for number, carrier in enumerate(["AA", "BB", "UA"], start=1)
            ],
        )
    sql = (
        f"SELECT carrier, {quoted(database, 'order')} AS place, ratio FROM {quoted(database, 'Odd Trips')} "
        "WHERE carrier NOT LIKE 'B%' AND ratio < :most ORDER BY carrier"
    )
    assert [(p.key, dict(p.context), p.weight) for p in ask(database, sql, weight="place", parameters={"most": 1})] == [
        ("AA", {"carrier": "AA", "place": 1, "ratio": 0.5}, 1.0),
        ("UA", {"carrier": "UA", "place": 3, "ratio": 0.5}, 3.0),
    ]


def test_a_query_without_parameters_is_taken_as_it_is_written(database: Engine) -> None:
    (partition,) = ask(database, "SELECT ' :x' AS a, '12:30' AS b, '%s' AS c")
    assert dict(partition.context) == {"a": " :x", "b": "12:30", "c": "%s"}


def test_what_json_has_not_becomes_text_or_an_integer(database: Engine) -> None:
    if database.dialect.name != "postgresql":
        pytest.skip("SQLite has no such types, and MySQL not all of them")
    identity = uuid.uuid4()
    (partition,) = ask(
        database,
        f"SELECT 'k' AS k, '{identity}'::uuid AS u, 1.50::numeric AS price, 7::numeric AS whole, "
        "'2024-01-02'::date AS d, '2024-01-02 03:04:05+02'::timestamptz AT TIME ZONE 'UTC' AS t, ARRAY[1, 2] AS many, "
        """'{"a": [1.5]}'::jsonb AS deep, NULL AS nothing""",
    )
    assert dict(partition.context) == {
        "k": "k",
        "u": str(identity),
        "price": "1.50",
        "whole": 7,
        "d": "2024-01-02",
        "t": "2024-01-02T01:04:05",
        "many": [1, 2],
        "deep": {"a": [1.5]},
        "nothing": None,
    }


def test_many_rows_are_streamed(database: Engine) -> None:
    fill(database, "Trip%Id", list(range(3_500)))
    trip, table = quoted(database, "Trip%Id"), quoted(database, "Odd Trips")
    found = ask(database, f"SELECT carrier, {trip} AS trip FROM {table}", key="trip")
    assert {partition.key for partition in found} == {str(number) for number in range(3_500)}


def test_a_query_that_the_database_refuses_is_an_error_of_the_database(database: Engine) -> None:
    with pytest.raises(DatabaseError, match="nowhere_to_be_found"):
        ask(database, "SELECT * FROM nowhere_to_be_found")


def test_a_query_cannot_write(database: Engine) -> None:
    fill(database, "order", [1])
    with pytest.raises((ConfigurationError, DatabaseError), match=r"rolled back|could not read"):
        ask(database, f"DELETE FROM {quoted(database, 'Odd Trips')}")
    assert len(cut(database, "order", 1)) == 1
