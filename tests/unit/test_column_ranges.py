"""ColumnRangePartitioner on SQLite, and the arithmetic of ranges."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Column, Date, DateTime, Engine, MetaData, String, Table, create_engine, insert

from airflow_dbpartition.errors import ConfigurationError, DatabaseError
from airflow_dbpartition.partitioners import (
    ColumnRangePartitioner,
    Partition,
    StandaloneEnvironment,
    collect_partitions,
)
from airflow_dbpartition.partitioners.ranges import Axis, AxisKind, NotOnAxisError, Range, close_gaps, cut_evenly


def collect(partitioner: object, grid_size: int = 4, **options: Any) -> list[Partition]:
    return collect_partitions(partitioner, grid_size=grid_size, **options)


def contexts(partitioner: object, grid_size: int = 4, **options: Any) -> list[dict[str, Any]]:
    return [dict(partition.context) for partition in collect(partitioner, grid_size, **options)]


def limits(partitioner: object, grid_size: int = 4) -> list[tuple[Any, Any]]:
    return [(context["min_value"], context["max_value"]) for context in contexts(partitioner, grid_size)]


whole_numbers = st.integers(min_value=-(2**70), max_value=2**70)


@given(low=whole_numbers, width=st.integers(min_value=1, max_value=2**71), parts=st.integers(1, 200))
def test_even_ranges_cover_everything_once_and_differ_in_width_by_at_most_one(low: int, width: int, parts: int) -> None:
    high = low + width - 1
    ranges = list(cut_evenly(low, high, parts))
    assert (ranges[0].low, ranges[-1].high) == (low, high)
    assert all(left.high + 1 == right.low for left, right in pairwise(ranges))
    widths = {part.high - part.low + 1 for part in ranges}
    assert len(ranges) == min(parts, width)
    assert min(widths) >= 1
    assert max(widths) - min(widths) <= 1


@given(st.lists(whole_numbers, min_size=2, max_size=60, unique=True))
def test_closed_gaps_keep_every_found_value_in_its_bucket(values: list[int]) -> None:
    values.sort()
    buckets = [Range(low, high, 7) for low, high in zip(values[::2], values[1::2], strict=False)]
    closed = list(close_gaps(buckets))
    assert [part.low for part in closed] == [bucket.low for bucket in buckets]
    assert closed[-1] == buckets[-1]
    assert all(left.high + 1 == right.low for left, right in pairwise(closed))
    assert all(part.high >= bucket.high for part, bucket in zip(closed, buckets, strict=True))
    assert {part.rows for part in closed} == {7}


def test_no_buckets_close_to_no_ranges() -> None:
    assert list(close_gaps([])) == []


@given(st.datetimes())
def test_a_timestamp_survives_the_way_to_a_number_and_back(moment: datetime) -> None:
    axis = Axis.of(AxisKind.MICROSECOND, moment)
    assert datetime.fromisoformat(str(axis.json(axis.number(moment)))) == moment


@given(st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)), st.integers(-12, 12))
def test_a_timestamp_with_a_time_zone_is_told_in_utc(moment: datetime, hours: int) -> None:
    aware = moment.replace(tzinfo=timezone(timedelta(hours=hours)))
    axis = Axis.of(AxisKind.MICROSECOND, aware)
    told = str(axis.json(axis.number(aware)))
    assert told.endswith("+00:00")
    assert datetime.fromisoformat(told) == aware


@given(st.dates())
def test_a_date_survives_the_way_to_a_number_and_back(day: date) -> None:
    axis = Axis(AxisKind.DAY)
    assert date.fromisoformat(str(axis.json(axis.number(day)))) == day


@pytest.mark.parametrize("value", ["7", 1.5, Decimal("1.5"), Decimal("NaN"), float("inf"), None])
def test_what_is_not_a_whole_number_is_refused(value: object) -> None:
    with pytest.raises(NotOnAxisError, match="not a whole number"):
        Axis(AxisKind.INTEGER).number(value)


def test_timestamps_with_and_without_a_time_zone_do_not_mix() -> None:
    with pytest.raises(NotOnAxisError, match="time zone"):
        Axis.of(AxisKind.MICROSECOND, "2024-01-01 00:00:00", "2024-01-01T00:00:00Z")


metadata = MetaData()
flights = Table(
    "flights",
    metadata,
    Column("id", BigInteger),
    Column("day", Date),
    Column("at", DateTime),
    Column("carrier", String(20)),
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'data.db'}"


@pytest.fixture
def database(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def fill(engine: Engine, *rows: dict[str, Any]) -> None:
    with engine.begin() as connection:
        connection.execute(insert(flights), list(rows))


def fill_ids(engine: Engine, *ids: int | None) -> None:
    fill(engine, *({"id": item} for item in ids))


def by_id(url: str, **options: Any) -> ColumnRangePartitioner:
    return ColumnRangePartitioner(table="flights", column="id", url=url, **options)


def test_ranges_of_integers_are_inclusive_and_without_gaps(database: Engine, url: str) -> None:
    fill_ids(database, -5, 0, 14)
    assert limits(by_id(url)) == [(-5, -1), (0, 4), (5, 9), (10, 14)]


def test_the_whole_range_of_a_bigint_can_be_cut(database: Engine, url: str) -> None:
    fill_ids(database, -(2**63), 2**63 - 1)
    assert limits(by_id(url), 2) == [(-(2**63), -1), (0, 2**63 - 1)]


def test_a_schema_may_be_named(database: Engine, url: str) -> None:
    fill_ids(database, 7)
    assert limits(by_id(url, schema="main")) == [(7, 7)]
    with pytest.raises(ConfigurationError, match="no table 'flights2' in schema 'main'"):
        collect(ColumnRangePartitioner(table="flights2", column="id", schema="main", url=url))


def test_there_are_no_more_ranges_than_values(database: Engine, url: str) -> None:
    fill_ids(database, 7, 8)
    assert limits(by_id(url), 100) == [(7, 7), (8, 8)]


@pytest.mark.parametrize("balanced", [False, True])
def test_an_empty_table_has_no_partitions(database: Engine, url: str, balanced: bool) -> None:
    assert collect(by_id(url, balanced=balanced, include_nulls=True)) == []


def test_dates_are_cut_into_inclusive_days(database: Engine, url: str) -> None:
    fill(database, {"day": date(2024, 2, 28)}, {"day": date(2024, 3, 2)})
    partitioner = ColumnRangePartitioner(table="flights", column="day", url=url)
    assert limits(partitioner, 2) == [("2024-02-28", "2024-02-29"), ("2024-03-01", "2024-03-02")]


def test_timestamps_are_cut_between_microseconds_so_that_between_fits_them_too(database: Engine, url: str) -> None:
    fill(database, {"at": datetime(2024, 1, 1)}, {"at": datetime(2024, 1, 1, 23, 59, 59, 999999)})
    partitioner = ColumnRangePartitioner(table="flights", column="at", url=url)
    assert limits(partitioner, 2) == [
        ("2024-01-01T00:00:00", "2024-01-01T11:59:59.999999"),
        ("2024-01-01T12:00:00", "2024-01-01T23:59:59.999999"),
    ]


@pytest.mark.parametrize("balanced", [False, True])
def test_rows_without_a_value_have_a_partition_only_when_asked_for(database: Engine, url: str, balanced: bool) -> None:
    fill_ids(database, 1, 2, None, None)
    assert [partition.key for partition in collect(by_id(url, balanced=balanced), 1)] == ["partition0"]
    asked = collect(by_id(url, balanced=balanced, include_nulls="True"), 1)
    assert asked == [
        Partition("partition0", {"is_null": False, "min_value": 1, "max_value": 2}, asked[0].weight, "until_started"),
        Partition(
            "null", {"is_null": True, "min_value": None, "max_value": None}, 2 if balanced else 1, "until_started"
        ),
    ]


def test_where_limits_the_rows_and_its_colons_and_per_cents_are_plain(database: Engine, url: str) -> None:
    fill(database, *({"id": item, "carrier": " :AA" if item < 5 else "UA"} for item in range(10)))
    assert limits(by_id(url, where="carrier LIKE ' :A%' -- only these"), 1) == [(0, 4)]


def test_balanced_ranges_follow_the_rows_and_not_the_gaps(database: Engine, url: str) -> None:
    fill_ids(database, *range(1, 9), 1_000_000, 1_000_001, 1_000_002, 1_000_003)
    partitions = collect(by_id(url, balanced=True), 3)
    assert [partition.weight for partition in partitions] == [4, 4, 4]
    assert limits(by_id(url, balanced=True), 3) == [(1, 4), (5, 999_999), (1_000_000, 1_000_003)]


def test_a_hot_value_is_never_split(database: Engine, url: str) -> None:
    fill_ids(database, 1, 2, 3, *[5] * 90, 6, 7, 8)
    partitions = collect(by_id(url, balanced=True), 10)
    assert [(p.context["min_value"], p.context["max_value"], p.weight) for p in partitions] == [
        (1, 4, 3),
        (5, 5, 90),
        (6, 8, 3),
    ]


def test_a_missing_table_is_named(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no table 'ops\.flights'.*write schema='ops', table='flights'"):
        collect(ColumnRangePartitioner(table="ops.flights", column="id", url=url))


def test_a_missing_column_is_named_with_those_that_there_are(database: Engine, url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no column 'ID2'; it has \['id', 'day', 'at', 'carrier'\]"):
        collect(ColumnRangePartitioner(table="flights", column="ID2", url=url))


def test_a_column_of_text_is_refused_with_the_alternatives(database: Engine, url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'carrier'.*VARCHAR\(20\).*QueryPartitioner"):
        collect(ColumnRangePartitioner(table="flights", column="carrier", url=url))


def test_text_in_a_column_of_integers_is_refused_by_name(database: Engine, url: str) -> None:
    with database.begin() as connection:
        connection.exec_driver_sql("INSERT INTO flights (id) VALUES ('abc')")
    with pytest.raises(ConfigurationError, match="column 'id' of 'flights' cannot be cut: 'abc' is not a whole number"):
        collect(by_id(url))


def test_sql_that_the_database_refuses_is_reported_without_passwords(database: Engine, url: str) -> None:
    partitioner = by_id(url, where="nonsense = 1")
    with pytest.raises(DatabaseError, match="nonsense"):
        collect(partitioner)
    secret = ColumnRangePartitioner(table="t", column="c", url="postgresql://me:s3cret@nowhere.invalid/db")
    assert "s3cret" not in repr(secret)
    with pytest.raises(DatabaseError) as caught:
        collect(secret)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("bad", ["nonsense", "nonsense://me:s3cret@host/db", "postgresql://me:s3cret@host:port/db"])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="SQLAlchemy database URL") as caught:
        collect(ColumnRangePartitioner(table="t", column="c", url=bad))
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("secret", ["u:s3cret@h/d", "u:s3c@s3cret@h/d", "h/d?password=s3cret", "h/d?a=b&token=s3cret"])
def test_a_partitioner_never_shows_a_password(secret: str) -> None:
    shown = repr(ColumnRangePartitioner(table="t", column="c", url=f"postgresql://{secret}"))
    assert "s3c" not in shown
    assert "h/d" in shown


def test_no_connection_and_no_url_means_the_job_repositorys_database(database: Engine) -> None:
    fill_ids(database, 1, 2)
    partitioner = ColumnRangePartitioner(table="flights", column="id")
    assert [dict(p.context) for p in collect(partitioner, 1, environment=StandaloneEnvironment(database))] == [
        {"min_value": 1, "max_value": 2}
    ]
    with pytest.raises(ConfigurationError, match="give the partitioner a url="):
        collect(ColumnRangePartitioner(table="flights", column="id"))


def test_a_connection_outside_airflow_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"conn_id 'warehouse'.*url="):
        collect(ColumnRangePartitioner(table="flights", column="id", conn_id="warehouse"))


@pytest.mark.parametrize("given", [{"table": ""}, {"column": None}, {"conn_id": "a", "url": "sqlite://"}])
def test_what_is_obviously_wrong_is_refused_when_the_dag_is_written(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"ColumnRangePartitioner: expected"):
        ColumnRangePartitioner(**{"table": "t", "column": "c", **given})


def test_a_flag_that_is_neither_true_nor_false_is_refused(database: Engine, url: str) -> None:
    with pytest.raises(ConfigurationError, match="expected balanced to be True or False, got 'perhaps'"):
        collect(by_id(url, balanced="perhaps"))
