"""What may be written to the database: strict JSON, and text without the characters databases refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


def check_json(value: object, path: str = "value", depth: int = 0) -> Any:
    """Return `value` as plain JSON types (tuples become lists), or say where it is not JSON.

    Args:
        value: anything a user handed over.
        path: how to name the value in errors, such as `context`.
        depth: how deep inside the outermost value this one is.

    Raises:
        NotStorableError: for other types, NaN and infinities, NUL and lone surrogates, non-string keys, and
            values that are nested deeper than DEEPEST_NESTING or contain themselves.
    """
    if depth > DEEPEST_NESTING:
        raise NotStorableError(path[:60] + "…", f"is nested deeper than {DEEPEST_NESTING} levels, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotStorableError(path, f"{value!r} is not a JSON number; use None or a string")
        return float(value)
    if isinstance(value, str):
        return _check_text(value, path)
    if isinstance(value, Mapping):
        checked: JsonObject = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise NotStorableError(path, f"expected string keys, got {key!r} ({type(key).__name__})")
            checked[_check_text(key, f"{path} key {key!r}")] = check_json(item, f"{path}[{key!r}]", depth + 1)
        return checked
    if isinstance(value, (list, tuple)):
        return [check_json(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise NotStorableError(path, f"{type(value).__name__} is not JSON (use str, int, float, bool, None, list or dict)")


def _check_text(text: str, path: str) -> str:
    if "\x00" in text:
        raise NotStorableError(path, "contains a NUL character, which databases refuse")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise NotStorableError(path, "contains a lone surrogate, which is not valid UTF-8") from None
    return str(text)


def dump_json(value: object, *, sort_keys: bool = False) -> str:
    """Strict JSON text, compact, non-ASCII kept."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


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
