"""S3KeysPartitioner: single objects, lists and ranges of keys, and the keys that a step gets back from each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.partitioners import Partition, S3KeysPartitioner, collect_partitions
from airflow_dbpartition.partitioners import s3_keys as module
from airflow_dbpartition.worker import s3_keys


class Bucket:
    """A bucket, as partitioners list it and as boto3's client does."""

    def __init__(self, objects: Mapping[str, int], *, page: int = 7) -> None:
        self.objects = dict(sorted(objects.items()))
        self.asked: list[dict[str, Any]] = []
        self.pages_read = 0
        self._page = page

    def engine(self, conn_id: str | None) -> AbstractContextManager[Engine]:
        raise NotImplementedError

    def path(self, url: str, conn_id: str | None) -> Path:
        raise NotImplementedError

    def s3_objects(self, bucket: str, prefix: str, conn_id: str | None) -> Iterator[tuple[str, int]]:
        self.asked.append({"bucket": bucket, "prefix": prefix, "conn_id": conn_id})
        yield from ((key, size) for key, size in self.objects.items() if key.startswith(prefix))

    def get_paginator(self, operation: str) -> Bucket:
        assert operation == "list_objects_v2"
        return self

    def paginate(self, **asked: str) -> Iterator[dict[str, Any]]:
        self.asked.append(asked)
        found = [
            {"Key": key, "Size": size}
            for key, size in self.objects.items()
            if key.startswith(asked["Prefix"]) and key > asked.get("StartAfter", "")
        ]
        for begin in range(0, max(len(found), 1), self._page):
            self.pages_read += 1
            page = found[begin : begin + self._page]
            yield {"Contents": page} if page else {}


def collect(bucket: Bucket, grid_size: int = 4, **options: Any) -> list[Partition]:
    return collect_partitions(S3KeysPartitioner("landing", **options), grid_size=grid_size, environment=bucket)


def keys_of(partitions: list[Partition], bucket: Bucket) -> list[list[str]]:
    """What the steps of these partitions get to see."""
    return [list(s3_keys(partition.context, bucket)) for partition in partitions]


DAYS = Bucket({"in/": 0, "in/a.csv": 5, "in/b.csv": 3, "in/b.json": 9, "in/empty.csv": 0, "other.csv": 7})


# --- one object a partition ----------------------------------------------------------------------------------------


def test_each_object_is_a_partition_weighing_its_bytes() -> None:
    found = collect(DAYS, prefix="in/", suffix=".csv", conn_id="aws")
    assert [(p.key, p.context, p.weight) for p in found] == [
        ("a.csv", {"bucket": "landing", "key": "in/a.csv", "size": 5}, 5),
        ("b.csv", {"bucket": "landing", "key": "in/b.csv", "size": 3}, 3),
        ("empty.csv", {"bucket": "landing", "key": "in/empty.csv", "size": 0}, 0),
    ]
    assert DAYS.asked[-1] == {"bucket": "landing", "prefix": "in/", "conn_id": "aws"}
    assert keys_of(found, DAYS) == [["in/a.csv"], ["in/b.csv"], ["in/empty.csv"]]


def test_a_partition_is_named_by_its_key_from_the_prefixs_last_folder_on() -> None:
    assert [p.key for p in collect(DAYS, prefix="in/b")] == ["b.csv", "b.json"]
    assert [p.key for p in collect(DAYS, suffix="other.csv")] == ["other.csv"]


def test_what_stands_for_a_folder_is_left_out_and_other_empty_objects_where_that_is_asked_for() -> None:
    assert [p.context["key"] for p in collect(DAYS, prefix="in/")] == [
        "in/a.csv",
        "in/b.csv",
        "in/b.json",
        "in/empty.csv",
    ]
    assert [p.key for p in collect(DAYS, prefix="in/", min_size_bytes="1")] == ["a.csv", "b.csv", "b.json"]
    assert [p.key for p in collect(DAYS, prefix="in/", suffix=[".json", "x"], min_size_bytes=9)] == ["b.json"]


def test_keys_that_cannot_name_a_partition_make_distinct_names() -> None:
    awkward = ["", " ", "a ", "a", "tab\tin", "nl\nin", "ü" * 400, "ü" * 401, "emoji \U0001f6eb"]
    bucket = Bucket({f"in/{name}": 1 for name in awkward})
    found = collect(bucket, prefix="in/")
    assert len({p.key for p in found}) == len(awkward)
    assert {p.context["key"] for p in found} == set(bucket.objects)
    assert {"a", "emoji \U0001f6eb"} <= {p.key for p in found}


# --- lists ---------------------------------------------------------------------------------------------------------


def test_lists_are_balanced_by_bytes() -> None:
    bucket = Bucket({"a": 10, "b": 7, "c": 6, "d": 5, "e": 2})
    found = collect(bucket, 2, bins="grid")
    assert [(p.key, p.context, p.weight) for p in found] == [
        ("bin0", {"bucket": "landing", "keys": ["a", "d"], "size": 15}, 15),
        ("bin1", {"bucket": "landing", "keys": ["b", "c", "e"], "size": 15}, 15),
    ]
    assert keys_of(found, bucket) == [["a", "d"], ["b", "c", "e"]]


def test_there_are_never_more_lists_than_objects() -> None:
    assert len(collect(Bucket({"a": 1, "b": 1}), bins=9)) == 2


def test_more_objects_than_lists_can_hold_are_refused_before_the_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_KEYS_IN_LISTS", 10)
    assert len(collect(Bucket({f"k{number:02}": 1 for number in range(10)}), bins=2)) == 2
    with pytest.raises(ConfigurationError, match=r"more than 10 objects in bucket 'landing'.*give ranges= instead"):
        collect(Bucket({f"k{number:02}": 1 for number in range(11)}), bins=2)


# --- ranges --------------------------------------------------------------------------------------------------------


def test_ranges_follow_each_other_in_the_order_of_the_keys() -> None:
    bucket = Bucket({"in/a.csv": 10, "in/b.csv": 10, "in/c.json": 99, "in/d.csv": 12, "in/e.csv": 0, "in/f.csv": 8})
    found = collect(bucket, 2, prefix="in/", suffix=".csv", ranges="grid", min_size_bytes=1)
    same = {"bucket": "landing", "prefix": "in/", "suffix": [".csv"], "min_size_bytes": 1, "objects": 2, "size": 20}
    assert [(p.key, p.context, p.weight) for p in found] == [
        ("range0", {**same, "start_after": None, "last_key": "in/b.csv"}, 20),
        ("range1", {**same, "start_after": "in/b.csv", "last_key": "in/f.csv"}, 20),
    ]
    assert keys_of(found, bucket) == [["in/a.csv", "in/b.csv"], ["in/d.csv", "in/f.csv"]]


objects = st.dictionaries(st.text("ab/é\U0001f6eb", min_size=1, max_size=6), st.integers(0, 60), max_size=40)


@given(objects, st.integers(1, 12), st.sampled_from(["", "a", "/"]), st.integers(0, 2))
def test_every_object_is_in_exactly_one_range(found: dict[str, int], ranges: int, prefix: str, least: int) -> None:
    bucket = Bucket(found, page=3)
    partitions = collect(bucket, ranges=ranges, prefix=prefix, min_size_bytes=least)
    wanted = [
        key
        for key, size in bucket.objects.items()
        if key.startswith(prefix) and size >= least and not (size == 0 and key.endswith("/"))
    ]
    seen = keys_of(partitions, bucket)
    assert [key for keys in seen for key in keys] == wanted
    assert [p.context["objects"] for p in partitions] == [len(keys) for keys in seen]
    assert [p.context["size"] for p in partitions] == [sum(bucket.objects[key] for key in keys) for keys in seen]
    assert len(partitions) <= ranges
    assert all(seen)


@pytest.mark.parametrize("seed", range(4))
def test_ranges_of_very_many_objects_are_balanced_though_not_every_object_is_remembered(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 100, 10_000, generator.randint(1, 200_000)]) for _ in range(20_000)]
    bucket = Bucket({f"{number:05}": size for number, size in enumerate(sizes)}, page=1000)
    partitions = collect(bucket, ranges=8)
    ideal = sum(sizes) / 8
    assert len(partitions) == 8
    assert sum(p.weight for p in partitions) == sum(sizes)
    assert sum(p.context["objects"] for p in partitions) == len(sizes)
    assert max(p.weight for p in partitions) <= ideal * (1 + 1 / 16) + max(sizes)
    assert min(p.weight for p in partitions) >= ideal * (1 - 1 / 16) - max(sizes)


def test_no_more_than_a_fixed_number_of_stretches_is_remembered() -> None:
    stretches = module._Stretches(3)
    most = 0
    for number in range(50_000):
        stretches.add(f"{number:06}", number % 1000)
        most = max(most, len(stretches))
    assert most == 64 * 3
    assert sum(found.objects for found in stretches.cut(3)) == 50_000


def test_empty_objects_are_spread_over_the_ranges() -> None:
    bucket = Bucket({f"{number:04}": 0 for number in range(1000)})
    counts = [p.context["objects"] for p in collect(bucket, ranges=4)]
    assert len(counts) == 4
    assert all(abs(count - 250) <= 250 / 16 for count in counts)


def test_an_object_that_is_heavier_than_a_range_should_be_leaves_fewer_ranges() -> None:
    bucket = Bucket({"a": 1, "b": 1000, "c": 1})
    assert [p.context["last_key"] for p in collect(bucket, ranges=8)] == ["a", "b", "c"]
    assert len(collect(Bucket({"a": 1000, "b": 1, "c": 1}), ranges=2)) == 2


def test_a_context_does_not_grow_with_the_number_of_objects() -> None:
    bucket = Bucket({f"{number:06}": 1 for number in range(100_000)})
    assert max(len(json.dumps(p.context)) for p in collect(bucket, ranges=2)) < 250


def test_a_bucket_that_is_not_listed_in_order_has_no_ranges() -> None:
    bucket = Bucket({})
    bucket.objects = {"b": 1, "a": 1}
    with pytest.raises(ConfigurationError, match=r"'a' came after 'b'.*directory buckets.*give bins= instead"):
        collect(bucket, ranges=2)
    assert len(collect(bucket, bins=2)) == 2


def test_what_comes_into_a_range_later_belongs_to_exactly_one_range() -> None:
    bucket = Bucket({"a": 1, "c": 1, "e": 1, "g": 1})
    partitions = collect(bucket, ranges=2)
    later = Bucket({**bucket.objects, "b": 1, "d": 1, "h": 1})
    assert keys_of(partitions, later) == [["a", "b", "c"], ["d", "e", "g"]]


# --- in the step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"bins": 1}, {"ranges": 1}], ids=lambda options: next(iter(options)))
def test_a_step_goes_on_behind_the_last_key_that_is_done(options: dict[str, int]) -> None:
    bucket = Bucket({f"in/{letter}": 1 for letter in "abcde"})
    (partition,) = collect(bucket, prefix="in/", **options)
    assert list(s3_keys(partition.context, bucket, after="in/b")) == ["in/c", "in/d", "in/e"]
    assert list(s3_keys(partition.context, bucket, after="in/e")) == []


def test_a_single_object_that_is_done_is_not_done_again() -> None:
    context = {"bucket": "landing", "key": "a", "size": 1}
    assert list(s3_keys(context, None)) == ["a"]
    assert list(s3_keys(context, None, after="a")) == []


def test_a_range_is_listed_from_its_beginning_and_no_further_than_its_end() -> None:
    bucket = Bucket({f"{number:03}": 1 for number in range(100)}, page=10)
    second = collect(bucket, ranges=5)[1]
    assert (second.context["start_after"], second.context["last_key"]) == ("019", "039")
    assert len(list(s3_keys(second.context, bucket))) == 20
    assert bucket.asked[-1] == {"Bucket": "landing", "Prefix": "", "StartAfter": "019"}
    assert bucket.pages_read == 3  # two of the range, and the one that says that it has ended


def test_a_context_of_another_partitioner_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected the context of an S3KeysPartitioner.*\['file', 'size'\]"):
        list(s3_keys({"file": "a", "size": 1}, None))


# --- what it is given ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bins": 3}, {"ranges": 3}], ids=str)
def test_no_matching_object_is_no_partition_unless_one_is_required(options: dict[str, int]) -> None:
    assert collect(DAYS, prefix="out/", **options) == []
    with pytest.raises(ConfigurationError, match=r"no object matches in bucket 'landing' below 'out/'.*required=False"):
        collect(DAYS, prefix="out/", required="true", **options)
    assert collect(DAYS, prefix="in/", required=True, **options)


@pytest.mark.parametrize("options", [{}, {"bins": 1}, {"ranges": 1}], ids=str)
def test_further_values_go_into_every_context(options: dict[str, int]) -> None:
    found = collect(DAYS, prefix="in/", context={"reference_date": "2026-11-02"}, **options)
    assert {p.context["reference_date"] for p in found} == {"2026-11-02"}
    with pytest.raises(ConfigurationError, match=r"context may not hold \['bucket', 'size'\]"):
        collect(DAYS, prefix="in/", context={"size": 1, "bucket": "x"}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 2, "ranges": 2}, r"expected bins or ranges, got both \(2 and 2\)"),
        ({"ranges": "many"}, "expected ranges to be an integer of at least 1 or \"grid\", got 'many'"),
        ({"bins": 0}, "expected bins to be an integer of at least 1"),
        ({"min_size_bytes": -1}, "expected min_size_bytes to be an integer of at least 0, got -1"),
        ({"suffix": [1]}, r"expected suffix to be text or a list of texts, got \[1\]"),
        ({"context": "x"}, "expected context to be a mapping, got 'x'"),
        ({"prefix": 5}, "expected prefix to be a non-empty string, got 5"),
        ({"required": "perhaps"}, "expected required to be True or False"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        collect(Bucket({} if "required" in options else {"a": 1}), **options)


def test_a_bucket_has_to_be_named_when_the_dag_is_read() -> None:
    with pytest.raises(ConfigurationError, match="expected bucket to be given, got ''"):
        S3KeysPartitioner("")


def test_a_bucket_is_only_listed_inside_airflow() -> None:
    with pytest.raises(ConfigurationError, match="bucket 'landing' can only be listed inside Airflow"):
        collect_partitions(S3KeysPartitioner("landing"), grid_size=1)
