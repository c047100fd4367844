"""The arithmetic of ranges: columns of integers, days and microseconds are cut as whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from typing import Any

_MICROSECOND = timedelta(microseconds=1)


class AxisKind(Enum):
    """What the whole numbers count."""

    INTEGER = "integer"
    DAY = "day"
    MICROSECOND = "microsecond"


class NotOnAxisError(ValueError):
    """A value of the column that is no whole number of the axis's unit."""


@dataclass(frozen=True)
class Axis:
    """Turns column values into whole numbers, and those into what stands in the execution context.

    `aware` timestamps are read and written as UTC; the others keep having no time zone.
    """

    kind: AxisKind
    aware: bool = False

    @classmethod
    def of(cls, kind: AxisKind, *samples: Any) -> Axis:
        """The axis that all samples are on.

        Raises:
            NotOnAxisError: when they are not, as where some have a time zone and others none.
        """
        aware = {_moment(value).tzinfo is not None for value in samples} if kind is AxisKind.MICROSECOND else {False}
        if len(aware) > 1:
            raise NotOnAxisError("some values have a time zone and others have none")
        return cls(kind, aware.pop())

    def number(self, value: Any) -> int:
        """The value as a whole number.

        Raises:
            NotOnAxisError: when it is none.
        """
        if self.kind is AxisKind.INTEGER:
            return _integer(value)
        if self.kind is AxisKind.DAY:
            return _day(value).toordinal()
        moment = _moment(value)
        try:
            plain = moment.astimezone(timezone.utc).replace(tzinfo=None) if self.aware else moment
        except OverflowError:
            raise NotOnAxisError(f"{value!r} is outside the years that can be reckoned with") from None
        return (plain - datetime.min) // _MICROSECOND

    def json(self, number: int) -> int | str:
        """A whole number as the context holds it: an integer, or ISO 8601 text."""
        if self.kind is AxisKind.INTEGER:
            return number
        if self.kind is AxisKind.DAY:
            return date.fromordinal(number).isoformat()
        moment = datetime.min + timedelta(microseconds=number)
        return (moment.replace(tzinfo=timezone.utc) if self.aware else moment).isoformat()


@dataclass(frozen=True)
class Range:
    """Whole numbers from `low` to `high`, both among them, and how many rows are known to be there."""

    low: int
    high: int
    rows: int = 1


def cut_evenly(low: int, high: int, parts: int) -> Iterator[Range]:
    """Cut low..high into at most `parts` ranges that cover it once, and differ in width by at most one."""
    width = high - low + 1
    parts = min(parts, width)
    for index in range(parts):
        yield Range(low + width * index // parts, low + width * (index + 1) // parts - 1)


def close_gaps(buckets: Sequence[Range]) -> Iterator[Range]:
    """Widen sorted buckets of found values until each ends where the next begins: later rows have a home too."""
    for bucket, following in pairwise(buckets):
        yield Range(bucket.low, following.low - 1, bucket.rows)
    yield from buckets[-1:]


def _integer(value: Any) -> int:
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (Decimal, float)):
        try:
            number = int(value)
        except (ValueError, OverflowError):
            raise NotOnAxisError(f"{value} is not a whole number") from None
        if number == value:
            return number
    raise NotOnAxisError(f"{value!r} is not a whole number")


def _day(value: Any) -> date:
    if isinstance(value, datetime):
        raise NotOnAxisError(f"{value.isoformat()} is a timestamp in a column of dates")
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(value)  # SQLite keeps dates as text
    except (TypeError, ValueError):
        raise NotOnAxisError(f"{value!r} is not an ISO 8601 date") from None


def _moment(value: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value.removesuffix("Z") + "+00:00" if value.endswith("Z") else value)
    except (AttributeError, TypeError, ValueError):
        raise NotOnAxisError(f"{value!r} is not an ISO 8601 timestamp") from None
