"""Who gets which partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.assignment import (
    AssignmentStrategy,
    FixedNodeCount,
    LeastLoaded,
    RoundRobin,
    Unassigned,
    apply,
    from_json,
    heaviest_first,
    parse_assignment,
    to_json,
    turns,
)
from airflow_dbpartition.domain import NodeStatus, NodeView, Partition
from airflow_dbpartition.errors import ConfigurationError


def node(node_id: str, *, load: int = 0, capacity: int = 4) -> NodeView:
    return NodeView(node_id, "default", NodeStatus.ACTIVE, capacity, load, ("step",), 0.0)


def weighted(*weights: float) -> list[Partition]:
    return [Partition(f"p{index}", weight=weight) for index, weight in enumerate(weights)]


def loads(assigned: Mapping[str, str | None], partitions: Sequence[Partition]) -> dict[str | None, float]:
    total: Counter[str | None] = Counter()
    for partition in partitions:
        total[assigned[partition.key]] += partition.weight  # type: ignore[assignment]
    return dict(total)


NODES = [node("a"), node("b"), node("c")]
BUILT_IN: list[AssignmentStrategy] = [RoundRobin(), FixedNodeCount(2), LeastLoaded(), Unassigned()]


@given(st.integers(0, 60), st.integers(1, 9), st.floats(0, 1e12))
def test_equal_weights_are_dealt_in_plain_turns(count: int, node_count: int, weight: float) -> None:
    nodes = [node(f"n{index}") for index in range(node_count)]
    assigned = apply(RoundRobin(), weighted(*[weight] * count), nodes)
    assert assigned == {f"p{index}": f"n{index % node_count}" for index in range(count)}


def test_the_heaviest_are_dealt_first_and_each_to_the_lightest_hand() -> None:
    partitions = weighted(1, 9, 1, 5, 4, 1)
    assigned = apply(RoundRobin(), partitions, NODES[:2])
    assert assigned == {"p1": "a", "p3": "b", "p4": "b", "p0": "a", "p2": "b", "p5": "a"}
    assert list(assigned) == [partition.key for partition in partitions]
    assert loads(assigned, partitions) == {"a": 11, "b": 10}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_no_node_is_ahead_by_more_than_one_partition(weights: list[int], node_count: int) -> None:
    partitions = weighted(*weights)
    nodes = [node(f"n{index}") for index in range(node_count)]
    for strategy in (RoundRobin(), LeastLoaded()):
        dealt = loads(apply(strategy, partitions, nodes), partitions)
        each = [dealt.get(item.node_id, 0) for item in nodes]
        assert sum(each) == sum(weights)
        assert max(each) - min(each) <= max(weights)


def test_weights_of_zero_are_spread_too() -> None:
    assert loads(apply(LeastLoaded(), weighted(0, 0, 0), NODES), weighted(1, 1, 1)) == {"a": 1, "b": 1, "c": 1}


def test_heaviest_first_keeps_the_order_of_equals() -> None:
    assert [p.key for p in heaviest_first(weighted(1, 2, 1, 2))] == ["p1", "p3", "p0", "p2"]


def test_a_fixed_number_of_nodes_takes_the_least_loaded() -> None:
    nodes = [node("busy", load=4), node("idle"), node("half", load=2), node("large", load=2, capacity=64)]
    assert set(apply(FixedNodeCount(2), weighted(1, 1, 1), nodes).values()) == {"idle", "large"}


def test_a_fixed_number_above_the_live_nodes_takes_all() -> None:
    assert set(apply(FixedNodeCount("9"), weighted(1, 1, 1), NODES).values()) == {"a", "b", "c"}


@pytest.mark.parametrize("n", [0, -1, True, None, 1.5])
def test_a_fixed_number_below_1_is_refused_at_once(n: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected n to be an integer of at least 1"):
        FixedNodeCount(n)


def test_a_fixed_number_that_a_template_got_wrong_is_refused_when_used() -> None:
    with pytest.raises(ConfigurationError, match="got 'many'"):
        apply(FixedNodeCount("many"), weighted(1), NODES)


def test_least_loaded_fills_up_who_has_less_to_do() -> None:
    nodes = [node("busy", load=3), node("idle")]
    assert Counter(apply(LeastLoaded(), weighted(*[1] * 5), nodes).values()) == {"idle": 4, "busy": 1}


def test_least_loaded_counts_a_running_partition_as_an_average_one() -> None:
    nodes = [node("busy", load=1), node("idle")]
    partitions = weighted(100, 100, 100)
    assert loads(apply(LeastLoaded(), partitions, nodes), partitions) == {"idle": 200, "busy": 100}


def test_least_loaded_gives_a_large_node_its_share() -> None:
    nodes = [node("small", capacity=1), node("large", capacity=3)]
    assert Counter(apply(LeastLoaded(), weighted(*[1] * 8), nodes).values()) == {"large": 6, "small": 2}


def test_unassigned_partitions_are_anybodys() -> None:
    assert apply(Unassigned(), weighted(1, 2), NODES) == {"p0": None, "p1": None}


@pytest.mark.parametrize("strategy", BUILT_IN, ids=repr)
def test_without_nodes_every_partition_is_anybodys(strategy: AssignmentStrategy) -> None:
    assert apply(strategy, weighted(1, 2), []) == {"p0": None, "p1": None}
    assert strategy.assign(weighted(1, 2), []) == {"p0": None, "p1": None}
    assert apply(strategy, [], NODES) == {}


class Custom:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> Mapping[str, str | None]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


def test_what_a_custom_strategy_leaves_out_is_anybodys() -> None:
    assert apply(Custom({"p1": "b"}), weighted(1, 1), NODES) == {"p0": None, "p1": "b"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"p0": "ghost"}, "there are no live nodes 'ghost'; the live nodes are 'a', 'b', 'c'"),
        ({"p0": "a", "p9": "a"}, "there are no partitions 'p9'"),
        (["a"], "expected a mapping of partition key to node id, got list"),
        (None, "got NoneType"),
        (KeyError("x"), "Custom.assign failed: KeyError: 'x'"),
        ({"p0": ["a"]}, "live nodes"),
    ],
)
def test_a_custom_strategy_that_answers_nonsense_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        apply(Custom(answer), weighted(1), NODES)


@pytest.mark.parametrize("strategy", BUILT_IN, ids=repr)
def test_a_strategy_survives_being_stored(strategy: AssignmentStrategy) -> None:
    assert from_json(to_json(strategy)) == strategy


def test_the_stored_form_is_a_name_and_settings() -> None:
    assert [to_json(strategy) for strategy in BUILT_IN] == [
        {"name": "round_robin"},
        {"name": "fixed_node_count", "n": 2},
        {"name": "least_loaded"},
        {"name": "unassigned"},
    ]


def test_code_is_never_imported_from_a_row() -> None:
    class Mine(RoundRobin):
        pass

    for custom in (Custom({}), Mine()):
        stored = to_json(custom)
        assert stored["name"] == "custom"
        assert stored["class"].endswith(type(custom).__qualname__)
        assert from_json(stored) == LeastLoaded()


@pytest.mark.parametrize(
    "row", [{}, {"name": "of_a_newer_version"}, {"name": "fixed_node_count", "n": -1}, {"name": 5}]
)
def test_a_row_that_cannot_be_read_places_by_load(row: dict[str, Any]) -> None:
    assert from_json(row) == LeastLoaded()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("round_robin", RoundRobin()), ("least_loaded", LeastLoaded()), ("unassigned", Unassigned())],
)
def test_a_strategy_may_be_given_by_name(name: str, strategy: AssignmentStrategy) -> None:
    assert parse_assignment(name) == strategy


def test_a_strategy_object_is_taken_as_it_is() -> None:
    custom = Custom({})
    assert parse_assignment(custom) is custom


@pytest.mark.parametrize("value", ["fixed_node_count", "random", None, 5, {"name": "round_robin"}, RoundRobin])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"expected assignment to be"):
        parse_assignment(value)


def test_a_large_plan_is_dealt_fast() -> None:
    partitions = weighted(*[index % 97 for index in range(50_000)])
    nodes = [node(f"n{index}", capacity=index % 5 + 1) for index in range(200)]
    assert set(apply(LeastLoaded(), partitions, nodes).values()) == {item.node_id for item in nodes}


@given(st.integers(1, 30), st.integers(1, 7), st.floats(0, 10))
def test_partitions_of_one_weight_are_dealt_in_turn_as_the_strategy_itself_would(
    partitions: int, nodes: int, weight: float
) -> None:
    plan = weighted(*[weight] * partitions)
    fleet = [node(f"n{number}", load=number % 3) for number in range(nodes)]
    for strategy in (RoundRobin(), FixedNodeCount(2), Unassigned()):
        in_turn = turns(strategy, fleet)
        assert in_turn is not None
        dealt = {one.key: in_turn[index % len(in_turn)] if in_turn else None for index, one in enumerate(plan)}
        assert dealt == apply(strategy, plan, fleet)


def test_a_strategy_that_looks_at_the_partitions_is_asked() -> None:
    class Custom:
        def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> dict[str, str | None]:
            return {partition.key: nodes[0].node_id for partition in partitions}

    assert turns(Custom(), [node("a")]) is None
    assert turns(LeastLoaded(), [node("a")]) is None
    assert turns(LeastLoaded(), []) == []
