"""FunctionPartitioner: a function, or a ready mapping of key to context, as a partitioner object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.partitioners.base import BoundPartitioner, PartitionResult


class FunctionPartitioner(BoundPartitioner):
    """Asks a function of the grid size, or of nothing, for the partitions.

    The wrapper matters inside Airflow, which calls any callable that it finds in a templated field.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ConfigurationError(f"FunctionPartitioner: expected a function, got {function!r}")
        self.function = function

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__qualname__)

    def __repr__(self) -> str:
        module = getattr(self.function, "__module__", None) or type(self.function).__module__
        return f"FunctionPartitioner({module}.{self.name})"

    def partition(self, grid_size: int) -> PartitionResult:
        """Call it with the grid size where it has a place for one.

        Raises:
            ConfigurationError: when it wants other arguments.
        """
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # some functions written in C have none
            return self.function(grid_size)  # type: ignore[no-any-return]
        attempts: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
            ((grid_size,), {}),
            ((), {"grid_size": grid_size}),
            ((), {}),
        )
        for args, kwargs in attempts:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                continue
            return self.function(*args, **kwargs)  # type: ignore[no-any-return]
        raise ConfigurationError(
            f"partitioner function {self.name}{signature}: expected it to take grid_size or nothing; "
            "bind its other arguments with functools.partial"
        )


class MappingPartitioner(BoundPartitioner):
    """A ready mapping of partition key to execution context, as Spring Batch's partitioners return."""

    template_fields: ClassVar[Sequence[str]] = ("contexts",)

    def __init__(self, contexts: Mapping[str, Mapping[str, Any]]) -> None:
        self.contexts = contexts

    def partition(self, grid_size: int) -> PartitionResult:  # noqa: ARG002
        return self.contexts
