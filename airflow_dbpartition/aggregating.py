"""Aggregators: one function that makes the task's return value of all partitions' results."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from airflow_dbpartition.errors import ConfigurationError

Aggregator = Callable[[Iterator[tuple[str, Any]]], Any]


def checked(aggregator: object) -> None:
    """Refuse what can be no aggregator, as far as that is seen without importing anything.

    Raises:
        ConfigurationError: it is neither a callable nor "module:function".
    """
    if aggregator is None or callable(aggregator):
        return
    parts = aggregator.split(":") if isinstance(aggregator, str) else []
    if len(parts) != 2 or not all(all(word.isidentifier() for word in part.split(".")) for part in parts):
        raise ConfigurationError(
            f'expected aggregator to be a function of the results, or "package.module:function", got {aggregator!r}'
        )


def resolved(aggregator: Aggregator | str) -> Aggregator:
    """The function itself, imported where it is named.

    Raises:
        ConfigurationError: there is no such module or function.
    """
    if not isinstance(aggregator, str):
        return aggregator
    module_name, _, path = aggregator.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for word in path.split("."):
            found = getattr(found, word)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"aggregator {aggregator!r} cannot be imported: {error}: Airflow's workers need its module"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"aggregator {aggregator!r} is no function but {type(found).__name__}")
    function: Aggregator = found
    return function
