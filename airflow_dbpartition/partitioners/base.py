"""What every partitioner shares: the protocol, binding to an environment, and reading templated values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, ClassVar, Protocol
from uuid import UUID

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.partitioners.environment import PartitionerEnvironment, StandaloneEnvironment

PartitionResult = Iterable[Partition | Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]


class Partitioner(Protocol):
    """Anything that cuts a step into partitions.

    One that needs connections or files also has `bind(environment)`, which is called first; one whose attributes
    may hold Jinja templates lists them in `template_fields`.
    """

    def partition(self, grid_size: int, /) -> PartitionResult:
        """The partitions: mappings (execution contexts), Partition objects, or one mapping of key to context.

        Args:
            grid_size: how many partitions the live nodes are good for; a wish, not an order.
        """


class BoundPartitioner:
    """Base of this package's partitioners: plain attributes, all templated, checked only when they are used."""

    template_fields: ClassVar[Sequence[str]] = ()
    context: Mapping[str, Any] | None = None  # of those that take further values for every partition
    _environment: PartitionerEnvironment | None = None

    def bind(self, environment: PartitionerEnvironment) -> None:
        """Take connections and files from this environment."""
        self._environment = environment

    @property
    def environment(self) -> PartitionerEnvironment:
        return self._environment or StandaloneEnvironment()

    def __getstate__(self) -> dict[str, Any]:
        # Engines are neither copied nor pickled: a partitioner is bound again where it lands.
        return {name: value for name, value in self.__dict__.items() if name != "_environment"}

    def __repr__(self) -> str:
        # Airflow hashes this text into the DAG version and shows it, so it is stable and holds no password.
        fields = ((name, getattr(self, name)) for name in self.template_fields)
        shown = (f"{name}={mask_secrets(repr(value))}" for name, value in fields if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _error(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"{type(self).__name__}: {text}")

    def _required(self, **fields: object) -> None:
        for name, value in fields.items():
            if value is None or (isinstance(value, str) and not value.strip()):
                raise self._error(f"expected {name} to be given, got {value!r}")

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        if not isinstance(value, str) or not value.strip():
            raise self._error(f"expected {name} to be a non-empty string, got {value!r}")
        return value

    def _optional_text(self, name: str) -> str | None:
        """None also for a template that came out blank."""
        value = getattr(self, name)
        return None if value is None or value == "" else self._text(name)

    def _flag(self, name: str) -> bool:
        value = getattr(self, name)
        if isinstance(value, str):
            value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower(), value)
        if not isinstance(value, bool):
            raise self._error(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        return value

    def _context(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """A partition's execution context: what the partitioner says, and the further values."""
        further = self.context or {}
        if not isinstance(further, Mapping):
            raise self._error(f"expected context to be a mapping, got {further!r}")
        if taken := sorted(own.keys() & further.keys()):
            raise self._error(f"context may not hold {taken}: the partitioner sets them; give yours other names")
        return {**own, **{name: to_json_value(value) for name, value in further.items()}}

    def _bins(self, value: object, grid_size: int, *, name: str = "bins") -> int | None:
        """A number of bins, "grid" for the grid size, or None for no bins."""
        if value is None or value == "":
            return None
        if value == "grid":
            return grid_size
        return whole_number(name, value, least=1, owner=type(self).__name__, otherwise=' or "grid"')


def whole_number(name: str, value: object, *, least: int, owner: str, otherwise: str = "") -> int:
    """Read an integer, or the text of one (templates render to text).

    Raises:
        ConfigurationError: for anything else, or less than `least`.
    """
    number: object = value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ConfigurationError(
            f"{owner}: expected {name} to be an integer of at least {least}{otherwise}, got {value!r}"
        )
    return number


def to_json_value(value: object) -> Any:
    """A database value as JSON: dates and times in ISO 8601, UUIDs as text, Decimals without loss.

    A Decimal without decimal places is an integer, any other is text. What is not known is left for the check of
    the execution context, which names it.
    """
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent
        return int(value) if isinstance(exponent, int) and exponent >= 0 else str(value)
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return value
