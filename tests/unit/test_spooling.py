"""A plan's partitions in a temporary file."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from airflow_dbpartition.domain import Partition, TransferPolicy
from airflow_dbpartition.partitioners.collecting import StorablePartition, checked_partitions
from airflow_dbpartition.partitioners.spooling import IN_MEMORY_BYTES, PartitionSpool


def test_what_is_read_is_what_was_put_in_as_often_as_it_is_read() -> None:
    given = [
        Partition(
            "a",
            {"text": "line\nbreak, \u2028, \x1e, ü, 🂡", "n": [1, 2.5, None, True, 2**70]},
            1.0,
            TransferPolicy.NEVER,
        ),
        Partition("b", {}, 0.1 + 0.2, TransferPolicy.ALWAYS),
    ]
    with PartitionSpool(checked_partitions(lambda: given, grid_size=1)) as spool:
        assert list(spool) == given
        assert list(spool) == given
        assert len(spool) == 2
        assert given[0] in spool
        assert not spool.is_uniform


def test_a_plan_that_is_read_half_is_read_from_its_start_again() -> None:
    given = [Partition(f"p{number}", {}, 1.0, TransferPolicy.NEVER) for number in range(5)]
    with PartitionSpool(checked_partitions(lambda: given, grid_size=1)) as spool:
        first = iter(spool)
        assert [next(first), next(first)] == given[:2]
        assert list(spool) == given
        assert spool.is_uniform


def test_an_error_of_the_partitioner_leaves_nothing_open() -> None:
    def failing() -> Iterator[StorablePartition]:
        yield StorablePartition("a", {}, "{}", 1.0, TransferPolicy.NEVER)
        raise RuntimeError("listing failed")

    with pytest.raises(RuntimeError, match="listing failed"):
        PartitionSpool(failing())


def test_a_plan_of_many_is_never_held_as_a_whole() -> None:
    def plan() -> Iterator[dict[str, object]]:
        for number in range(60_000):
            yield {"number": number, "padding": "x" * 200}

    tracemalloc.start()
    try:
        with PartitionSpool(checked_partitions(plan, grid_size=1)) as spool:
            assert sum(1 for _ in spool) == 60_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * IN_MEMORY_BYTES
