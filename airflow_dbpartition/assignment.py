"""Assignment strategies: which live node gets which partition when a plan is written or work is re-placed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from airflow_dbpartition.domain import NodeView, Partition
from airflow_dbpartition.errors import ConfigurationError, DbPartitionError
from airflow_dbpartition.storable import JsonObject


class AssignmentStrategy(Protocol):
    """Anything that says who gets what."""

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView], /) -> Mapping[str, str | None]:
        """Partition key -> node id; None, or a key that is left out, leaves the partition to whoever comes first.

        Args:
            partitions: those to be placed.
            nodes: the live nodes that can run them, at least one.
        """


class _Strategy:
    """A built-in strategy: equal to any other of the same name and settings."""

    name: ClassVar[str]
    template_fields: ClassVar[Sequence[str]] = ()

    def settings(self) -> JsonObject:
        return {}

    def turns(self, nodes: Sequence[NodeView]) -> Sequence[str] | None:  # noqa: ARG002
        """The nodes to whom partitions of one weight are dealt in turn; empty = nobody's; None = `assign` must tell."""
        return None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.__dict__.items())})"


class RoundRobin(_Strategy):
    """Deal the partitions to the nodes in turn; where weights differ, the next heaviest to the lightest hand so far."""

    name = "round_robin"

    def turns(self, nodes: Sequence[NodeView]) -> Sequence[str]:
        return [node.node_id for node in nodes]

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> dict[str, str | None]:
        return _deal(partitions, [_Hand(node.node_id) for node in nodes])


class FixedNodeCount(_Strategy):
    """Round robin over `n` nodes only, those with the least load for their capacity; over all if there are fewer.

    Args:
        n: at least 1; the text of a number (a template) or an XCom is accepted.
    """

    name = "fixed_node_count"
    template_fields = ("n",)

    def __init__(self, n: int | str) -> None:
        self.n = n
        if isinstance(n, (int, float)) or n is None:  # text, and another task's output, are known later
            self.count()

    def count(self) -> int:
        """`n` as a number.

        Raises:
            ConfigurationError: when it is none, or less than 1.
        """
        number: object = self.n
        if isinstance(number, str) and number.strip().isdecimal():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"FixedNodeCount: expected n to be an integer of at least 1, got {self.n!r}")
        return number

    def settings(self) -> JsonObject:
        return {"n": self.count()}

    def turns(self, nodes: Sequence[NodeView]) -> Sequence[str]:
        return RoundRobin().turns(self._chosen(nodes))

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> dict[str, str | None]:
        return RoundRobin().assign(partitions, self._chosen(nodes))

    def _chosen(self, nodes: Sequence[NodeView]) -> list[NodeView]:
        return heapq.nsmallest(self.count(), nodes, key=lambda node: node.current_load / max(1, node.capacity))


class LeastLoaded(_Strategy):
    """Give each partition, heaviest first, to the node that will be the least loaded for its capacity with it.

    A node's load is what it was given so far plus what it already runs. Of the latter only the number is known, so
    each counts as an average partition of this plan: load and weights are then in the same unit.
    """

    name = "least_loaded"

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> dict[str, str | None]:
        average = sum(partition.weight for partition in partitions) / max(1, len(partitions)) or 1.0
        hands = [
            _Hand(node.node_id, load=max(0, node.current_load) * average, capacity=max(1, node.capacity))
            for node in nodes
        ]
        return _deal(partitions, hands)


class Unassigned(_Strategy):
    """Leave every partition to whichever node asks first."""

    name = "unassigned"

    def turns(self, nodes: Sequence[NodeView]) -> Sequence[str]:  # noqa: ARG002
        return []

    def assign(self, partitions: Sequence[Partition], nodes: Sequence[NodeView]) -> dict[str, str | None]:  # noqa: ARG002
        return {partition.key: None for partition in partitions}


class _Hand:
    """A node while partitions are dealt. `held` breaks ties, so that weights of 0 are spread, too."""

    __slots__ = ("capacity", "held", "load", "node_id", "place")

    def __init__(self, node_id: str, *, load: float = 0.0, capacity: int = 1) -> None:
        self.node_id = node_id
        self.load = load
        self.capacity = capacity
        self.held = 0
        self.place = 0

    def __lt__(self, other: _Hand) -> bool:
        return (self.load, self.held, self.place) < (other.load, other.held, other.place)

    def after(self, weight: float) -> tuple[float, float, int]:
        """How full it would be, for its capacity."""
        return (self.load + weight) / self.capacity, (self.held + 1) / self.capacity, self.place


def heaviest_first(partitions: Iterable[Partition]) -> list[Partition]:
    """By falling weight; those of the same weight stay in their order."""
    return sorted(partitions, key=lambda partition: -partition.weight)


def _deal(partitions: Sequence[Partition], hands: Sequence[_Hand]) -> dict[str, str | None]:
    """Longest processing time first. One heap for each capacity: within one, the lightest hand is the best."""
    if not hands:
        return {partition.key: None for partition in partitions}
    heaps: dict[int, list[_Hand]] = {}
    for place, hand in enumerate(hands):
        hand.place = place
        heapq.heappush(heaps.setdefault(hand.capacity, []), hand)
    dealt: dict[str, str | None] = {}
    for partition in heaviest_first(partitions):
        weight = partition.weight
        heap = min(heaps.values(), key=lambda candidates: candidates[0].after(weight))
        hand = heap[0]
        hand.load += weight
        hand.held += 1
        heapq.heapreplace(heap, hand)
        dealt[partition.key] = hand.node_id
    return {partition.key: dealt[partition.key] for partition in partitions}


def turns(strategy: AssignmentStrategy, nodes: Sequence[NodeView]) -> Sequence[str] | None:
    """Whom partitions that all weigh the same are dealt to in turn, as `apply` would, without having them all.

    Returns:
        Node ids; none = nobody's; None where the strategy has to be asked.
    """
    if not nodes:
        return []
    return strategy.turns(nodes) if isinstance(strategy, _Strategy) else None


def apply(
    strategy: AssignmentStrategy, partitions: Sequence[Partition], nodes: Sequence[NodeView]
) -> dict[str, str | None]:
    """Ask the strategy and check its answer; partitions that it leaves out, and all when no node lives, get None.

    Raises:
        ConfigurationError: a custom strategy failed, or named nodes or partitions that there are not.
    """
    keys = [partition.key for partition in partitions]
    if not nodes:
        return dict.fromkeys(keys)
    name = type(strategy).__name__
    try:
        answer: object = strategy.assign(partitions, nodes)
    except DbPartitionError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{name}.assign failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, Mapping):
        raise ConfigurationError(
            f"{name}.assign: expected a mapping of partition key to node id, got {type(answer).__name__}"
        )
    known_keys, known_nodes = set(keys), {node.node_id for node in nodes}
    strangers = [key for key in answer if key not in known_keys]
    if strangers:
        raise ConfigurationError(f"{name}.assign: there are no partitions {_few(strangers)}")
    nowhere = {str(node) for node in answer.values() if node is not None and str(node) not in known_nodes}
    if nowhere:
        raise ConfigurationError(
            f"{name}.assign: there are no live nodes {_few(sorted(nowhere))}; the live nodes are "
            f"{_few(sorted(known_nodes))}"
        )
    return {key: answer.get(key) for key in keys}


def _few(names: Sequence[object]) -> str:
    shown = ", ".join(repr(name) for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


_BY_NAME: dict[str, type[RoundRobin] | type[LeastLoaded] | type[Unassigned]] = {
    strategy.name: strategy for strategy in (RoundRobin, LeastLoaded, Unassigned)
}


def to_json(strategy: AssignmentStrategy) -> JsonObject:
    """How the strategy is stored in an execution's settings; of a custom one only the class's name."""
    kind = type(strategy)
    if isinstance(strategy, _Strategy) and kind in (*_BY_NAME.values(), FixedNodeCount):
        return {"name": strategy.name, **strategy.settings()}
    return {"name": "custom", "class": f"{kind.__module__}.{kind.__qualname__}"}


def from_json(value: Mapping[str, Any]) -> AssignmentStrategy:
    """The strategy that a row describes.

    A worker never imports code that a row names, and a sweep never fails over a row: for a custom strategy, one of a
    newer version, or what cannot be read, LeastLoaded places the work.
    """
    name = value.get("name")
    try:
        if name == FixedNodeCount.name:
            return FixedNodeCount(value["n"])
        return _BY_NAME.get(str(name), LeastLoaded)()
    except (KeyError, ConfigurationError):
        return LeastLoaded()


def parse_assignment(value: object) -> AssignmentStrategy:
    """Read what a DAG author writes: a strategy object, or the name of one that needs no settings.

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]()
    if isinstance(value, type):
        raise ConfigurationError(f"expected assignment to be an object, got the class: write {value.__name__}(...)")
    if not isinstance(value, str) and callable(getattr(value, "assign", None)):
        return value  # type: ignore[return-value]
    names = ", ".join(f'"{name}"' for name in _BY_NAME)
    raise ConfigurationError(
        f"expected assignment to be {names}, FixedNodeCount(n) or an object with assign(partitions, nodes), "
        f"got {value!r}"
    )
