"""The partitioners of queries, lists and files on this machine, and what all partitioners share."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Column, Date, DateTime, Engine, MetaData, String, Table, create_engine, insert

from airflow_dbpartition.errors import ConfigurationError, InvalidPartitionError
from airflow_dbpartition.partitioners import (
    ColumnRangePartitioner,
    FilesPartitioner,
    ListPartitioner,
    Partition,
    QueryPartitioner,
    S3KeysPartitioner,
    SimplePartitioner,
    StandaloneEnvironment,
    collect_partitions,
)
from airflow_dbpartition.partitioners.packing import Sized, pack


def collect(partitioner: object, grid_size: int = 4, **options: Any) -> list[Partition]:
    return collect_partitions(partitioner, grid_size=grid_size, **options)


def contexts(partitioner: object, grid_size: int = 4, **options: Any) -> list[dict[str, Any]]:
    return [dict(partition.context) for partition in collect(partitioner, grid_size, **options)]


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


def test_each_row_of_a_query_is_a_partition(database: Engine, url: str) -> None:
    fill(database, {"id": 1, "carrier": "AA"}, {"id": 2, "carrier": "UA"})
    sql = "SELECT carrier, id FROM flights WHERE id >= :least ORDER BY id"
    partitions = collect(QueryPartitioner(sql, weight="id", parameters={"least": 1}, url=url))
    assert partitions == [
        Partition("AA", {"carrier": "AA", "id": 1}, 1.0, "until_started"),
        Partition("UA", {"carrier": "UA", "id": 2}, 2.0, "until_started"),
    ]


def test_without_parameters_a_colon_in_a_query_is_only_a_colon(url: str) -> None:
    assert contexts(QueryPartitioner("SELECT ' :x' AS a, '12:30' AS b, '%s' AS c", url=url)) == [
        {"a": " :x", "b": "12:30", "c": "%s"}
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sql": "SELECT 1 AS a, 2 AS a"}, r"returns \['a'\] more than once"),
        ({"sql": "SELECT 1 AS a", "key": "b"}, r"key column 'b' is not in the result; it has \['a'\]"),
        ({"sql": "SELECT 1 AS a", "weight": "b"}, "weight column 'b' is not in the result"),
        ({"sql": "SELECT NULL AS a"}, "row 1 has None in its key column 'a'"),
        ({"sql": "SELECT 1 AS a, NULL AS b", "weight": "b"}, "None in its weight column 'b'.*COALESCE"),
        ({"sql": "DELETE FROM flights"}, "expected sql to return rows"),
        ({"sql": "SELECT 1 AS a UNION ALL SELECT 1"}, "key '1' comes more than once"),
        ({"sql": "SELECT x'00' AS a, 1 AS k", "key": "k"}, r"'1' cannot be stored: context\['a'\]: bytes is not JSON"),
        ({"sql": "SELECT 1", "parameters": "x"}, "expected parameters to be a dict"),
    ],
)
def test_a_query_that_makes_no_partitions_is_refused(
    database: Engine, url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigurationError, InvalidPartitionError), match=message):
        collect(QueryPartitioner(url=url, **options))


def test_a_query_changes_nothing(database: Engine, url: str) -> None:
    fill(database, {"id": 1})
    with pytest.raises(ConfigurationError, match="rolled back"):
        collect(QueryPartitioner("DELETE FROM flights", url=url))
    assert len(collect(QueryPartitioner("SELECT id FROM flights", url=url))) == 1


def test_each_value_of_a_list_is_a_partition_named_after_it() -> None:
    assert [(p.key, p.context) for p in collect(ListPartitioner(["eu", 7], context_name="tenant"))] == [
        ("eu", {"tenant": "eu"}),
        ("7", {"tenant": 7}),
    ]


def test_mappings_are_contexts_and_one_of_their_fields_is_the_key() -> None:
    values = [{"tenant_id": 1, "since": date(2024, 1, 1)}, {"tenant_id": 2, "since": None}]
    assert [(p.key, p.context) for p in collect(ListPartitioner(values, key="tenant_id"))] == [
        ("1", {"tenant_id": 1, "since": "2024-01-01"}),
        ("2", {"tenant_id": 2, "since": None}),
    ]


def test_values_are_dealt_to_bins_in_turn() -> None:
    assert [(p.key, p.context, p.weight) for p in collect(ListPartitioner("[1, 2, 3, 4, 5]", bins="2"))] == [
        ("bin0", {"values": [1, 3, 5]}, 3),
        ("bin1", {"values": [2, 4]}, 2),
    ]
    assert len(collect(ListPartitioner(list("abc"), bins="grid"), 2)) == 2
    assert len(collect(ListPartitioner(list("abc"), bins=9))) == 3


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (ListPartitioner(["a", "b", "a"]), "'a' stands more than once"),
        (ListPartitioner([1, "1"]), "'1' stands more than once"),
        (ListPartitioner(["a", "a"], bins=2), "'a' stands more than once"),
        (ListPartitioner("a,b"), "text of a JSON list, got 'a,b'"),
        (ListPartitioner('{"a": 1}'), "text of a JSON list, got dict"),
        (ListPartitioner({"a"}), "text of a JSON list, got set"),
        (ListPartitioner(5), "text of a JSON list, got int 5"),
        (ListPartitioner([{"a": 1}]), "give key="),
        (ListPartitioner([{"a": 1}], key="b"), r"values\[0\] has no field 'b'; it has \['a'\]"),
        (ListPartitioner([None]), r"values\[0\] cannot name a partition"),
        (ListPartitioner(["a"], bins="many"), "expected bins to be an integer of at least 1 or \"grid\", got 'many'"),
        (ListPartitioner(["a"], bins=0), "at least 1"),
        (ListPartitioner(["a"], bins=True), "expected bins"),
    ],
)
def test_a_list_that_makes_no_partitions_is_refused(partitioner: ListPartitioner, message: str) -> None:
    with pytest.raises((ConfigurationError, InvalidPartitionError), match=message):
        collect(partitioner)


def test_an_empty_list_has_no_partitions() -> None:
    assert collect(ListPartitioner([])) == collect(ListPartitioner("[]")) == collect(ListPartitioner([], bins=3)) == []


def write(folder: Path, **sizes: int) -> None:
    for name, size_bytes in sizes.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size_bytes)


def test_each_file_is_a_partition_weighing_its_bytes(tmp_path: Path) -> None:
    write(tmp_path, b=3, a=0, sub__c=5)
    assert [(p.key, p.context, p.weight) for p in collect(FilesPartitioner(tmp_path))] == [
        ("a", {"file": str(tmp_path / "a"), "size": 0}, 0),
        ("b", {"file": str(tmp_path / "b"), "size": 3}, 3),
    ]
    found = collect(FilesPartitioner(f"file://{tmp_path}", pattern="[bc]", recursive="true"))
    assert [p.key for p in found] == ["b", "sub/c"]


def test_bins_are_balanced_by_bytes(tmp_path: Path) -> None:
    write(tmp_path, a=10, b=7, c=6, d=5, e=2)
    partitions = collect(FilesPartitioner(tmp_path, bins="grid"), 2)
    assert [(p.key, [Path(f).name for f in p.context["files"]], p.context["size"]) for p in partitions] == [
        ("bin0", ["a", "d"], 15),
        ("bin1", ["b", "c", "e"], 15),
    ]


def test_empty_files_are_spread_over_the_bins(tmp_path: Path) -> None:
    write(tmp_path, a=0, b=0, c=0, d=0)
    assert [len(p.context["files"]) for p in collect(FilesPartitioner(tmp_path, bins=2))] == [2, 2]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 15))
def test_every_file_is_in_exactly_one_bin_and_no_bin_is_empty(sizes: list[int], bins: int) -> None:
    files = [Sized(f"f{index}", f"/f{index}", size) for index, size in enumerate(sizes)]
    packed = pack(files, bins)
    assert sorted(file for bin_ in packed for file in bin_) == sorted(files)
    assert len(packed) == min(bins, len(files))
    assert all(packed)
    totals = [sum(file.size_bytes for file in bin_) for bin_ in packed]
    assert max(totals) - min(totals) <= max(sizes)


def test_no_matching_file_is_no_partition_unless_one_is_required(tmp_path: Path) -> None:
    assert collect(FilesPartitioner(tmp_path, pattern="*.csv")) == []
    assert collect(FilesPartitioner(tmp_path, pattern="*.csv", bins=4)) == []
    with pytest.raises(ConfigurationError, match=r"no file matches '\*\.csv'.*required=False"):
        collect(FilesPartitioner(tmp_path, pattern="*.csv", required=True))


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no directory"):
        collect(FilesPartitioner(tmp_path / "missing"))


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, a=1)
    with pytest.raises(ConfigurationError, match="is a file; give its directory"):
        collect(FilesPartitioner(tmp_path / "a"))


def test_a_pattern_that_leaves_the_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected pattern to be relative to path, got '/etc/"):
        collect(FilesPartitioner(tmp_path, pattern="/etc/*"))


def test_an_object_store_needs_airflow() -> None:
    with pytest.raises(ConfigurationError, match="'s3://bucket/x'; other schemes need Airflow"):
        collect(FilesPartitioner("s3://bucket/x"))


def test_a_path_object_brings_its_own_connection() -> None:
    class StoragePath:
        conn_id = "aws"

        def __str__(self) -> str:
            return "s3://bucket/x"

        def glob(self, pattern: str) -> list[str]:
            return []

    partitioner = FilesPartitioner(StoragePath())
    assert (partitioner.path, partitioner.conn_id) == ("s3://bucket/x", "aws")


def test_a_very_long_path_still_makes_a_unique_key(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 150)
    write(folder.parent, **{f"{'d' * 150}__{'f' * 100}{name}": 1 for name in "ab"})
    keys = [p.key for p in collect(FilesPartitioner(tmp_path, recursive=True))]
    assert len(set(keys)) == 2
    assert {len(key) for key in keys} == {200}


def test_object_paths_are_read_through_the_environment(tmp_path: Path) -> None:
    write(tmp_path, a=4)
    asked: list[tuple[str, str | None]] = []

    class Environment:
        def engine(self, conn_id: str | None) -> AbstractContextManager[Engine]:
            return nullcontext(create_engine("sqlite://"))

        def path(self, url: str, conn_id: str | None) -> Path:
            asked.append((url, conn_id))
            return tmp_path / "nothing" if url.endswith("nothing") else tmp_path

    assert [p.key for p in collect(FilesPartitioner("s3://bucket", conn_id="aws"), environment=Environment())] == ["a"]
    assert asked == [("s3://bucket", "aws")]
    assert collect(FilesPartitioner("s3://bucket/nothing"), environment=Environment()) == []


def test_further_values_go_into_every_context(tmp_path: Path, database: Engine, url: str) -> None:
    write(tmp_path, a=1, b=2)
    day = {"day": date(2026, 11, 2)}
    told = contexts(FilesPartitioner(tmp_path, pattern="[ab]", context=day))
    told += contexts(FilesPartitioner(tmp_path, pattern="[ab]", bins=1, context=day))
    fill(database, {"id": 1}, {"id": 7}, {"id": None})
    ranges = ColumnRangePartitioner(table="flights", column="id", url=url, include_nulls=True, context=day)
    told += contexts(ranges, 2)
    assert [context["day"] for context in told] == ["2026-11-02"] * 6
    with pytest.raises(ConfigurationError, match=r"ColumnRangePartitioner: context may not hold \['min_value'\]"):
        collect(ColumnRangePartitioner(table="flights", column="id", url=url, context={"min_value": 1}))
    with pytest.raises(ConfigurationError, match=r"FilesPartitioner: context may not hold \['file'\]"):
        collect(FilesPartitioner(tmp_path, pattern="[ab]", context={"file": 1}))


ALL: list[Any] = [
    SimplePartitioner(),
    ColumnRangePartitioner(table="{{ params.t }}", column="id", url="sqlite://", balanced="{{ params.b }}"),
    ListPartitioner("{{ params.v }}", bins="{{ params.n }}"),
    QueryPartitioner("SELECT '{{ ds }}'", url="sqlite://"),
    FilesPartitioner("/data/{{ ds }}", pattern="{{ params.p }}"),
    S3KeysPartitioner("landing", "{{ params.p }}", ranges="grid", context={"day": "{{ params.d }}"}),
]


@pytest.mark.parametrize("partitioner", ALL, ids=lambda partitioner: type(partitioner).__name__)
def test_every_field_is_a_plain_templated_attribute(partitioner: Any) -> None:
    assert set(partitioner.template_fields) == set(vars(partitioner)) - {"_environment"}


@pytest.mark.parametrize("partitioner", ALL, ids=lambda partitioner: type(partitioner).__name__)
def test_a_bound_partitioner_can_be_copied_and_pickled(partitioner: Any) -> None:
    bound = copy.copy(partitioner)
    bound.bind(StandaloneEnvironment(create_engine("sqlite://")))
    for copied in (copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert vars(copied) == vars(partitioner)
        assert repr(copied) == repr(partitioner)


@pytest.mark.parametrize("partitioner", ALL, ids=lambda partitioner: type(partitioner).__name__)
def test_airflow_can_neither_call_nor_resolve_a_partitioner(partitioner: Any) -> None:
    # Its templating calls what is callable, and resolves what has `resolve`.
    assert not callable(partitioner)
    assert not hasattr(partitioner, "resolve")
    assert " at 0x" not in repr(partitioner)


def test_importing_the_partitioners_imports_neither_sqlalchemy_nor_airflow() -> None:
    code = (
        "import sys, airflow_dbpartition.partitioners as p; p.SimplePartitioner();"
        "p.ColumnRangePartitioner(table='t', column='c');"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'sqlalchemy', 'airflow'}))"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert ran.stdout.strip() == "[]"
