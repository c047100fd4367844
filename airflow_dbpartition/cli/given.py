"""Reading the JSON that `dbpartition submit` is given: strict, since what is read wrongly is work that is lost."""

from __future__ import annotations

import json
from typing import Any

from airflow_dbpartition.cli.options import UsageError
from airflow_dbpartition.domain import Partition, TransferPolicy
from airflow_dbpartition.errors import InvalidPartitionError
from airflow_dbpartition.partitioners import collect_partitions

_STDIN = 0


class _NotStrictError(ValueError):
    """What json would read, one way or another, and the author did not mean."""


def read_text(name: str) -> str:
    """The text of a file, or of stdin where the name is -; UTF-8, whatever the locale says."""
    try:
        with open(_STDIN if name == "-" else name, "rb", closefd=name != "-") as file:
            return file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --partitions {name}: {error}") from None


def read_partitions(text: str, *, default_transferable: TransferPolicy) -> list[Partition]:
    """A JSON list, a JSON object of key to context, or one JSON object a line, checked to be storable.

    An object of just `key` and `context` (and `weight`, `transferable`) is a partition; any other is a context.

    Raises:
        InvalidPartitionError: names the line or the partition.
    """
    items = [_partition(item, index) for index, item in enumerate(_items(text))]

    def given() -> list[Any]:
        return items

    given.__qualname__ = "--partitions"  # as errors name it
    return collect_partitions(given, grid_size=1, default_transferable=default_transferable)


def _items(text: str) -> list[Any]:
    if not text.strip():
        raise InvalidPartitionError("--partitions is empty: did what writes it fail? [] is a job without partitions")
    try:
        data = _strict(text)
    except json.JSONDecodeError as error:
        return _lines(text, error)
    except ValueError as error:
        raise InvalidPartitionError(f"--partitions: {error}") from None
    if isinstance(data, dict):
        if _is_partition(data) and isinstance(data["key"], str):  # one line of lines
            return [data]
        return [{"key": key, "context": context} for key, context in data.items()]
    if not isinstance(data, list):
        raise InvalidPartitionError(f"expected --partitions to hold a list or an object, got {type(data).__name__}")
    return data


def _lines(text: str, whole: json.JSONDecodeError) -> list[Any]:
    items: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON's strings may hold Unicode's other line ends
        if not line.strip():
            continue
        try:
            items.append(_strict(line))
        except ValueError as error:
            if not items and isinstance(error, json.JSONDecodeError):
                raise InvalidPartitionError(f"--partitions is not JSON: {whole}") from None
            raise InvalidPartitionError(f"--partitions line {number} is not JSON: {error}") from None
    return items


def _is_partition(item: dict[str, Any]) -> bool:
    return {"key", "context"} <= item.keys() <= {"key", "context", "weight", "transferable"}


def _partition(item: Any, index: int) -> Any:
    if not isinstance(item, dict):
        raise InvalidPartitionError(f"expected partition {index} of --partitions to be an object, got {item!r:.100}")
    return Partition(**item) if _is_partition(item) else item


def read_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object that was typed as an option."""
    try:
        value = _strict(text)
    except ValueError as error:
        raise UsageError(f"expected {option} to be a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"expected {option} to be a JSON object, got {text!r}")
    return value


def _strict(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise _NotStrictError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _NotStrictError(f"the key {key!r} comes more than once in one object; keys must be unique")
        found[key] = value
    return found


def _no_number(word: str) -> Any:
    raise _NotStrictError(f"{word} is not a JSON number; use null or a string")
