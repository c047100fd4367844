"""Key values as JSON and back, so that a checkpoint can hold where reading stands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from airflow_dbpartition.errors import ConfigurationError


def encode_position(value: object) -> Any:
    """A key value as JSON: plain where JSON has it, else {"type": …, "value": …}.

    Raises:
        ConfigurationError: for a type that has no order to read by.
    """
    if isinstance(value, (int, str, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, datetime):
        return {"type": "datetime", "value": value.isoformat()}
    if isinstance(value, date):
        return {"type": "date", "value": value.isoformat()}
    if isinstance(value, Decimal):
        return {"type": "decimal", "value": str(value)}
    if isinstance(value, UUID):
        return {"type": "uuid", "value": str(value)}
    raise ConfigurationError(
        f"cannot read by key {value!r} ({type(value).__name__}): use an integer, text, date, timestamp or UUID column"
    )


def decode_position(value: Any) -> Any:
    """What `encode_position` was given; None stays None."""
    if not isinstance(value, dict):
        return value
    readers: dict[str, Callable[[str], Any]] = {
        "datetime": datetime.fromisoformat,
        "date": date.fromisoformat,
        "decimal": Decimal,
        "uuid": UUID,
    }
    return readers[value["type"]](value["value"])
