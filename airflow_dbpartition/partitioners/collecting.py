"""collect_partitions: asks a partitioner of any shape, and checks all that it says before anything is stored."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple, Union

from airflow_dbpartition.domain import Partition, TransferPolicy
from airflow_dbpartition.errors import ConfigurationError, DbPartitionError, InvalidPartitionError
from airflow_dbpartition.partitioners.base import Partitioner, whole_number
from airflow_dbpartition.partitioners.environment import PartitionerEnvironment
from airflow_dbpartition.partitioners.function import FunctionPartitioner, MappingPartitioner
from airflow_dbpartition.storable import (
    DEFAULT_CONTEXT_LIMIT_BYTES,
    JsonObject,
    NotStorableError,
    check_json,
    dump_json,
    storable_text,
)

KEY_LIMIT_CHARS = 200


class StorablePartition(NamedTuple):
    """A partition that has been checked: a plain context with its JSON text, a float, a policy of its own."""

    key: str
    context: JsonObject
    context_json: str
    weight: float
    transferable: TransferPolicy

    def as_partition(self) -> Partition:
        return Partition(self.key, self.context, self.weight, self.transferable)


PartitionSource = Union[Partitioner, Callable[..., Any], Mapping[str, Mapping[str, Any]]]  # noqa: UP007
"""What may be given as a partitioner: an object, a function of grid_size or of nothing, or key -> context."""


def as_partitioner(source: object) -> Partitioner:
    """Make an object with `partition` of anything that may be given as a partitioner.

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(source, type):
        raise ConfigurationError(f"expected partitioner to be an object, got the class: write {source.__name__}(...)")
    if callable(getattr(source, "partition", None)) and not isinstance(source, str):
        return source  # type: ignore[return-value]
    if callable(source):
        return FunctionPartitioner(source)
    if isinstance(source, Mapping):
        return MappingPartitioner(source)
    raise ConfigurationError(
        "expected partitioner to be an object with partition(grid_size), a function, or a mapping of key to context, "
        f"got {type(source).__name__}"
    )


def collect_partitions(
    partitioner: object,
    *,
    grid_size: int,
    environment: PartitionerEnvironment | None = None,
    default_transferable: object = TransferPolicy.UNTIL_STARTED,
    context_limit_bytes: int = DEFAULT_CONTEXT_LIMIT_BYTES,
) -> list[Partition]:
    """All of `checked_partitions`, whose keys are unique.

    Raises:
        ConfigurationError, InvalidPartitionError: as `checked_partitions`; and where a key comes more than once.
    """
    collected: dict[str, Partition] = {}
    for partition in checked_partitions(
        partitioner,
        grid_size=grid_size,
        environment=environment,
        default_transferable=default_transferable,
        context_limit_bytes=context_limit_bytes,
    ):
        if partition.key in collected:
            raise InvalidPartitionError(
                f"{partitioner_name(partitioner)}: partition key {partition.key!r} comes more than once; "
                "keys must be unique"
            )
        collected[partition.key] = partition.as_partition()
    return list(collected.values())


def partitioner_name(source: object) -> str:
    """How errors call a partitioner."""
    asked = as_partitioner(source)
    return asked.name if isinstance(asked, FunctionPartitioner) else type(asked).__name__


def checked_partitions(
    partitioner: object,
    *,
    grid_size: int,
    environment: PartitionerEnvironment | None = None,
    default_transferable: object = TransferPolicy.UNTIL_STARTED,
    context_limit_bytes: int = DEFAULT_CONTEXT_LIMIT_BYTES,
) -> Generator[StorablePartition, None, None]:
    """Ask once, in one pass, for all partitions, and yield each as soon as it is known, ready to be stored.

    Whether keys are unique is left to whoever keeps them. A plain mapping in the result is an execution context; its
    key is `partition{i}`, by its position.

    Args:
        partitioner: what PartitionSource says.
        grid_size: how many partitions the live nodes are good for, at least 1.
        environment: what the partitioner is bound to, if it can be.
        default_transferable: for partitions that say nothing themselves.
        context_limit_bytes: how large a context may be, as UTF-8 JSON.

    Raises:
        ConfigurationError: the partitioner itself, or an argument, is wrong.
        InvalidPartitionError: what it returned cannot be stored, or it failed; the cause is then its own error.
            Airflow's exceptions, such as a skip, and this package's pass through as they are.
    """
    whole_number("grid_size", grid_size, least=1, owner="collect_partitions")
    default = TransferPolicy.parse(default_transferable)
    asked = as_partitioner(partitioner)
    name = partitioner_name(asked)
    bind = getattr(asked, "bind", None)
    if environment is not None and callable(bind):
        bind(environment)
    check = _Check(name, default, context_limit_bytes)
    with closing(_results(asked, grid_size, name)) as results:
        for position, item in enumerate(results):
            yield check.partition(item, position)


def _results(partitioner: Partitioner, grid_size: int, name: str) -> Generator[object, None, None]:
    """What the partitioner yields; its own errors are named after it, a skip of Airflow's stays a skip."""
    try:
        result: object = partitioner.partition(grid_size)
        if isinstance(result, Mapping):
            result = [_from_pair(key, context, name) for key, context in result.items()]
        if isinstance(result, (str, bytes, bytearray, Partition)) or not isinstance(result, Iterable):
            if inspect.iscoroutine(result):
                result.close()  # or it would complain that nobody awaited it
            raise InvalidPartitionError(
                f"{name}: expected partition() to return or yield mappings or Partition objects, "
                f"got {type(result).__name__}{_quoted(result)}"
            )
        yield from result
    except DbPartitionError:
        raise
    except Exception as error:
        if any(cls.__module__.partition(".")[0] == "airflow" for cls in type(error).__mro__):
            raise
        raise InvalidPartitionError(f"{name} failed: {type(error).__name__}: {storable_text(error)}") from error


def _from_pair(key: object, context: object, name: str) -> Partition:
    if not isinstance(context, Mapping):
        raise InvalidPartitionError(
            f"{name}: a mapping is read as partition key -> execution context, but {key!r} has "
            f"{type(context).__name__}{_quoted(context)}; put a single context into a list"
        )
    return Partition(key, context)  # type: ignore[arg-type]  # the key is checked with all others


def _quoted(value: object) -> str:
    return f" {value!r}" if isinstance(value, (str, int, float)) else ""


class _Check:
    """Checks one result after the other against what the table can hold."""

    def __init__(self, name: str, default: TransferPolicy, context_limit_bytes: int) -> None:
        self._name = name
        self._default = default
        self._limit_bytes = context_limit_bytes

    def partition(self, item: object, position: int) -> StorablePartition:
        if isinstance(item, Partition):
            key, transferable = self._key(item.key, position), self._default
            if item.transferable is not None:
                transferable = self._policy(key, item.transferable)
            context, text = self._context(key, item.context)
            return StorablePartition(key, context, text, self._weight(key, item.weight), transferable)
        if isinstance(item, Mapping):
            key = f"partition{position}"
            return StorablePartition(key, *self._context(key, item), 1.0, self._default)
        raise InvalidPartitionError(
            f"{self._name}: expected result {position} to be a mapping or a Partition, "
            f"got {type(item).__name__}{_quoted(item)}"
        )

    def _key(self, key: object, position: int) -> str:
        wanted = f"{self._name}: expected the key of result {position} to be "
        if not isinstance(key, str):
            raise InvalidPartitionError(f"{wanted}text, got {key!r} ({type(key).__name__}); use str()")
        if not key or key != key.strip():  # MySQL takes 'a' and 'a ' for the same
            raise InvalidPartitionError(f"{wanted}text without blanks at its ends, and not empty, got {key!r}")
        if len(key) > KEY_LIMIT_CHARS:
            raise InvalidPartitionError(
                f"{wanted}at most {KEY_LIMIT_CHARS} characters long, got {len(key)}: {key[:60]!r}…; shorten it, "
                "and keep what is long in the context"
            )
        try:
            return str(check_json(key, "key"))
        except NotStorableError as error:
            raise InvalidPartitionError(f"{wanted}storable text, got {key!r}: it {error.why}") from None

    def _context(self, key: str, context: object) -> tuple[JsonObject, str]:
        if not isinstance(context, Mapping):
            raise InvalidPartitionError(
                f"{self._name}: expected the context of partition {key!r} to be a mapping, got {type(context).__name__}"
            )
        try:
            checked: JsonObject = check_json(context, "context")
            text = dump_json(checked)
            size_bytes = len(text) if text.isascii() else len(text.encode())
        except (ValueError, RecursionError) as error:  # a NotStorableError says where; the others are about size
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InvalidPartitionError(f"{self._name}: partition {key!r} cannot be stored: {why}") from None
        if size_bytes > self._limit_bytes:
            raise InvalidPartitionError(
                f"{self._name}: the context of partition {key!r} has {size_bytes} bytes, the limit is "
                f"{self._limit_bytes}; hand over where the data is instead of the data, or raise context_limit_bytes"
            )
        return checked, text

    def _weight(self, key: str, weight: object) -> float:
        if isinstance(weight, (Real, Decimal)) and not isinstance(weight, bool):
            number = float(weight)
            if math.isfinite(number) and number >= 0:
                return number
        raise InvalidPartitionError(
            f"{self._name}: expected the weight of partition {key!r} to be a number of at least 0, got {weight!r}"
        )

    def _policy(self, key: str, transferable: object) -> TransferPolicy:
        try:
            return TransferPolicy.parse(transferable)
        except ConfigurationError as error:
            raise InvalidPartitionError(f"{self._name}: partition {key!r}: {error}") from None
