"""What may be written to the database: strict JSON, and text without the characters databases refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

DEFAULT_CONTEXT_LIMIT_BYTES = 1024 * 1024
MESSAGE_LIMIT_CHARS = 8_000

JsonObject = dict[str, Any]


class NotStorableError(ValueError):
    """A value that cannot be stored as strict JSON; `path` says where inside it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


DEEPEST_NESTING = 100


def check_json(value: object, path: str = "value") -> Any:
    """Return `value` as plain JSON types (tuples become lists), or say where it is not JSON.

    Args:
        value: anything a user handed over.
        path: how to name the value in errors, such as `context`.

    Raises:
        NotStorableError: for other types, NaN and infinities, NUL and lone surrogates, non-string keys, and
            values that are nested deeper than DEEPEST_NESTING or contain themselves.
    """
    try:
        return _plain(value, 0)
    except _RefusedError as error:
        where = path + "".join(reversed(error.inside))
        raise NotStorableError(where[:60] + "…" if error.is_too_deep else where, error.why) from None


class _RefusedError(ValueError):
    """What is wrong; `inside` grows on the way out, so that a path is only made of what is refused."""

    def __init__(self, why: str, *, is_too_deep: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.inside: list[str] = []
        self.is_too_deep = is_too_deep


def _plain(value: object, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        return _checked_text(value)  # type: ignore[arg-type]
    if value is None or kind is int or kind is bool:
        return value
    if depth > DEEPEST_NESTING:
        why = f"is nested deeper than {DEEPEST_NESTING} levels, or contains itself"
        raise _RefusedError(why, is_too_deep=True)
    if isinstance(value, Mapping):
        return _plain_mapping(value, depth + 1)
    if isinstance(value, (list, tuple)):
        return _plain_list(value, depth + 1)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _RefusedError(f"{value!r} is not a JSON number; use None or a string")
        return float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return _checked_text(value)
    raise _RefusedError(f"{kind.__name__} is not JSON (use str, int, float, bool, None, list or dict)")


def _plain_mapping(value: Mapping[Any, Any], depth: int) -> JsonObject:
    checked: JsonObject = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _RefusedError(f"expected string keys, got {key!r} ({type(key).__name__})")
        try:
            name = _checked_text(key)
        except _RefusedError as error:
            error.inside.append(f" key {key!r}")
            raise
        try:
            checked[name] = _plain(item, depth)
        except _RefusedError as error:
            error.inside.append(f"[{key!r}]")
            raise
    return checked


def _plain_list(value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
    checked = []
    for index, item in enumerate(value):
        try:
            checked.append(_plain(item, depth))
        except _RefusedError as error:
            error.inside.append(f"[{index}]")
            raise
    return checked


def _checked_text(text: str) -> str:
    if "\x00" in text:
        raise _RefusedError("contains a NUL character, which databases refuse")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _RefusedError("contains a lone surrogate, which is not valid UTF-8") from None
    return str(text)


# Made once: json.dumps makes an encoder at each call, which takes longer than a small object does.
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_SORTING_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def dump_json(value: object, *, sort_keys: bool = False) -> str:
    """Strict JSON text, compact, non-ASCII kept."""
    return (_SORTING_ENCODER if sort_keys else _ENCODER).encode(value)


class JsonText(Mapping[str, Any]):
    """A JSON object that stays text until somebody looks into it.

    Args:
        text: as `dump_json` writes it.
    """

    __slots__ = ("_read", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._read: JsonObject | None = None

    def _object(self) -> JsonObject:
        if self._read is None:
            self._read = json.loads(self.text)
        return self._read

    def __getitem__(self, key: str) -> Any:
        return self._object()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._object())

    def __len__(self) -> int:
        return len(self._object())

    def __repr__(self) -> str:
        return repr(self._object())


def storable_text(text: object, limit: int = MESSAGE_LIMIT_CHARS) -> str:
    """Make any text writable: a failure must never fail to be recorded.

    NUL and lone surrogates are replaced; of a text over `limit` characters the first quarter and the end are
    kept, since the cause stands at the end of a traceback.
    """
    cleaned = str(text).replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")
    if len(cleaned) <= limit:
        return cleaned
    head = limit // 4
    marker = f"\n… {len(cleaned) - limit} characters left out …\n"
    return cleaned[:head] + marker + cleaned[len(cleaned) - (limit - head - len(marker)) :]
