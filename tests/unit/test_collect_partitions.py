"""What may be a partitioner, and the check of what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from airflow_dbpartition.domain import TransferPolicy
from airflow_dbpartition.errors import ConfigurationError, InvalidPartitionError
from airflow_dbpartition.partitioners import (
    FunctionPartitioner,
    Partition,
    SimplePartitioner,
    StandaloneEnvironment,
    collect_partitions,
)


def collect(partitioner: object, grid_size: int = 4, **options: Any) -> list[Partition]:
    return collect_partitions(partitioner, grid_size=grid_size, **options)


def contexts(partitioner: object, grid_size: int = 4, **options: Any) -> list[dict[str, Any]]:
    return [dict(partition.context) for partition in collect(partitioner, grid_size, **options)]


def test_a_simple_partitioner_numbers_its_partitions() -> None:
    assert [(p.key, p.context) for p in collect(SimplePartitioner(), 2)] == [
        ("partition0", {"partition": 0, "partitions": 2}),
        ("partition1", {"partition": 1, "partitions": 2}),
    ]


def test_a_function_of_the_grid_size_is_a_partitioner() -> None:
    def sized(grid_size: int) -> list[dict[str, int]]:
        return [{"i": index} for index in range(grid_size)]

    def named(*, grid_size: int) -> list[dict[str, int]]:
        return sized(grid_size)

    for function in (sized, named, FunctionPartitioner(sized)):
        assert [(p.key, p.context) for p in collect(function, 2)] == [
            ("partition0", {"i": 0}),
            ("partition1", {"i": 1}),
        ]


def test_a_function_without_arguments_is_a_partitioner() -> None:
    assert contexts(lambda: ({"i": index} for index in range(3))) == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_function_that_wants_more_is_refused() -> None:
    def greedy(a: int, b: int) -> list[dict[str, int]]:
        return [{"a": a, "b": b}]

    with pytest.raises(ConfigurationError, match=r"greedy\(a: 'int', b: 'int'\).*functools.partial"):
        collect(greedy)


def test_a_mapping_of_key_to_context_is_a_partitioner_and_a_result() -> None:
    ready = {"eu": {"n": 1}, "us": {"n": 2}}
    for source in (ready, lambda grid_size: ready):
        assert [(p.key, p.context) for p in collect(source)] == [("eu", {"n": 1}), ("us", {"n": 2})]


def test_a_single_context_is_not_taken_for_a_mapping_of_keys() -> None:
    with pytest.raises(InvalidPartitionError, match="'min' has int 1; put a single context into a list"):
        collect(lambda: {"min": 1, "max": 2})


def test_no_partitions_are_an_empty_list() -> None:
    assert collect(lambda: ()) == collect(lambda: iter(())) == collect({}) == []


@pytest.mark.parametrize("source", [SimplePartitioner, 5, None, "round", [{"a": 1}]])
def test_what_is_no_partitioner_is_refused(source: object) -> None:
    with pytest.raises(ConfigurationError, match="expected partitioner to be an object"):
        collect(source)


@pytest.mark.parametrize("result", [None, "text", b"bytes", 5, Partition("a")])
def test_a_result_that_is_no_collection_is_refused(result: object) -> None:
    with pytest.raises(InvalidPartitionError, match=f"expected partition.. to return .*got {type(result).__name__}"):
        collect(lambda: result)


@pytest.mark.filterwarnings("error")
def test_a_coroutine_is_refused() -> None:
    async def later(grid_size: int) -> list[dict[str, int]]:
        return []

    with pytest.raises(InvalidPartitionError, match="got coroutine"):
        collect(later)


@pytest.mark.parametrize("item", [None, 5, "eu", ("eu", {})])
def test_a_result_that_is_neither_mapping_nor_partition_is_refused(item: object) -> None:
    with pytest.raises(InvalidPartitionError, match="expected result 1 to be a mapping or a Partition"):
        collect(lambda: [{"a": 1}, item])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "not empty"),
        ("  ", "without blanks"),
        ("a ", "without blanks"),
        (7, r"text, got 7 \(int\)"),
        ("k" * 201, "at most 200 characters long, got 201"),
        ("a\x00b", "NUL"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused(key: Any, message: str) -> None:
    with pytest.raises(InvalidPartitionError, match=message):
        collect(lambda: [Partition(key)])


def test_a_key_of_200_characters_is_accepted() -> None:
    assert len(collect(lambda: [Partition("é" * 200)])) == 1


def test_two_partitions_of_one_key_are_refused() -> None:
    with pytest.raises(InvalidPartitionError, match="key 'eu' comes more than once"):
        collect(lambda: [Partition("eu"), Partition("us"), Partition("eu")])


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"a": {"b": [1, datetime(2024, 1, 1)]}}, r"'eu' cannot be stored: context\['a'\]\['b'\]\[1\]: datetime"),
        ({"a": float("nan")}, r"context\['a'\]: nan"),
        ({1: 2}, "expected string keys"),
        ({"a": 10**5000}, "'eu' cannot be stored"),
        ([1], "expected the context of partition 'eu' to be a mapping, got list"),
    ],
)
def test_a_context_that_is_not_json_is_refused_by_place(context: Any, message: str) -> None:
    with pytest.raises(InvalidPartitionError, match=message):
        collect(lambda: [Partition("eu", context)])


def test_a_context_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["me"] = endless
    expected = r"'eu' cannot be stored: .* is nested deeper than 100 levels, or contains itself"
    with pytest.raises(InvalidPartitionError, match=expected):
        collect(lambda: [Partition("eu", endless)])


def test_the_size_of_a_context_is_counted_in_bytes_and_the_limit_is_named() -> None:
    fits = [Partition("eu", {"a": "é" * 5})]  # {"a":"ééééé"} is 18 bytes
    assert len(collect(lambda: fits, context_limit_bytes=18)) == 1
    with pytest.raises(InvalidPartitionError, match=r"'eu' has 18 bytes, the limit is 17; .*raise context_limit_bytes"):
        collect(lambda: fits, context_limit_bytes=17)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", None, True])
def test_a_weight_that_is_no_number_of_at_least_0_is_refused(weight: Any) -> None:
    with pytest.raises(InvalidPartitionError, match="expected the weight of partition 'eu'"):
        collect(lambda: [Partition("eu", {}, weight)])


def test_weights_are_returned_as_floats() -> None:
    weights = [p.weight for p in collect(lambda: [Partition("a", {}, 3), Partition("b", {}, Decimal("1.5"))])]  # type: ignore[arg-type]
    assert weights == [3.0, 1.5]
    assert {type(weight) for weight in weights} == {float}


def test_each_partition_may_have_its_own_transfer_policy() -> None:
    given = [Partition("a"), Partition("b", transferable=False), Partition("c", transferable="until_started"), {}]
    assert [p.transferable for p in collect(lambda: given, default_transferable=True)] == [
        TransferPolicy.ALWAYS,
        TransferPolicy.NEVER,
        TransferPolicy.UNTIL_STARTED,
        TransferPolicy.ALWAYS,
    ]
    with pytest.raises(InvalidPartitionError, match=r"'a': expected transferable.*got 'maybe'"):
        collect(lambda: [Partition("a", transferable="maybe")])
    with pytest.raises(ConfigurationError, match="expected transferable"):
        collect(lambda: given, default_transferable="maybe")


def test_an_error_in_the_middle_names_the_partitioner_and_keeps_its_cause() -> None:
    class Flaky:
        def partition(self, grid_size: int) -> Iterator[dict[str, int]]:
            yield {"a": 1}
            raise KeyError("lost")

    with pytest.raises(InvalidPartitionError, match="Flaky failed: KeyError: 'lost'") as caught:
        collect(Flaky())
    assert isinstance(caught.value.__cause__, KeyError)


def test_airflows_own_exceptions_pass_so_that_a_skip_stays_a_skip() -> None:
    skip = type("AirflowSkipException", (Exception,), {"__module__": "airflow.sdk.exceptions"})

    class MySkip(skip):  # type: ignore[misc,valid-type]
        pass

    def skipping() -> list[dict[str, int]]:
        raise MySkip("nothing today")

    with pytest.raises(MySkip, match="nothing today"):
        collect(skipping)


def test_a_generator_is_closed_at_once_when_a_result_is_refused() -> None:
    closed: list[bool] = []

    def generating() -> Iterator[Partition]:
        try:
            yield Partition("")
        finally:
            closed.append(True)

    with pytest.raises(InvalidPartitionError) as caught:
        collect(generating)
    assert (closed, caught.value is not None) == ([True], True)


def test_an_object_with_bind_is_bound_before_it_is_asked() -> None:
    class Bindable:
        environment: object = None

        def bind(self, environment: object) -> None:
            self.environment = environment

        def partition(self, grid_size: int) -> list[dict[str, bool]]:
            return [{"bound": self.environment is given_environment}]

    given_environment = StandaloneEnvironment()
    assert contexts(Bindable(), environment=given_environment) == [{"bound": True}]


@pytest.mark.parametrize("grid_size", [0, -1, True, 1.5])
def test_a_grid_size_below_1_is_refused(grid_size: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected grid_size to be an integer of at least 1"):
        collect(SimplePartitioner(), grid_size)
