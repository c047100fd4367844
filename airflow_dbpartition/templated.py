"""Reading the arguments of operators: numbers, flags and durations that may have come out of a template as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from airflow_dbpartition.assignment import parse_assignment
from airflow_dbpartition.domain import TransferPolicy
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.partitioners.base import whole_number

Reader = Callable[[str, Any], Any]


def is_template(value: object) -> bool:
    """Whether the value is only known once the task runs: text with Jinja in it, or another task's output."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    return callable(getattr(value, "resolve", None)) and callable(getattr(value, "iter_references", None))


def integer(least: int) -> Reader:
    """Reads an integer of at least `least`, or its text."""

    def read(name: str, value: Any) -> int:
        try:
            return whole_number(name, value, least=least, owner="")
        except ConfigurationError as error:
            raise ConfigurationError(str(error).removeprefix(": ")) from None

    return read


def flag(name: str, value: Any) -> bool:
    """Reads True or False, or their text."""
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise ConfigurationError(f"expected {name} to be True or False, got {value!r}")
    return value


def duration_s(name: str, value: Any) -> float:
    """Reads a timedelta, a number of seconds or its text, more than 0; returns seconds."""
    seconds = _seconds(value)
    if seconds is None or not seconds > 0:
        raise ConfigurationError(f"expected {name} to be a timedelta or a positive number of seconds, got {value!r}")
    return seconds


def delay_s(name: str, value: Any) -> float:
    """As `duration_s`, but may be 0."""
    seconds = _seconds(value)
    if seconds is None or seconds < 0:
        raise ConfigurationError(f"expected {name} to be a timedelta or a number of seconds, got {value!r}")
    return seconds


def _seconds(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None


def optional(reader: Reader) -> Reader:
    """None stays None, as does a template that came out blank or as "None"."""

    def read(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip() in ("", "None")):
            return None
        return reader(name, value)

    return read


def one_of(*choices: str) -> Reader:
    """Reads one of some words."""

    def read(name: str, value: Any) -> str:
        if value not in choices:
            wanted = " or ".join(f'"{choice}"' for choice in choices)
            raise ConfigurationError(f"expected {name} to be {wanted}, got {value!r}")
        return str(value)

    return read


def text(limit: int) -> Reader:
    """Reads text of 1 to `limit` characters."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value.strip()) <= limit:
            raise ConfigurationError(f"expected {name} to be text of 1 to {limit} characters, got {value!r}")
        return value.strip()

    return read


conn_id = text(250)
"""Reads the name of an Airflow connection."""


def transfer_policy(name: str, value: Any) -> TransferPolicy:  # noqa: ARG001 - a Reader
    """Reads True, False or "until_started", or their text."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    return TransferPolicy.parse(value)


def assignment(name: str, value: Any) -> Any:  # noqa: ARG001 - a Reader
    """Reads the name of an assignment strategy, or an object that is one."""
    return parse_assignment(value)


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Reads a mapping with text as keys."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"expected {name} to be a mapping, got {type(value).__name__} {value!r}")
    return dict(value)
