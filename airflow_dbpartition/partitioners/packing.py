"""What partitioners of files and objects share: packing by bytes, and names that make partition keys."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from typing import NamedTuple

_KEY_LIMIT_CHARS = 200
_DIGEST_CHARS = 32


class Sized(NamedTuple):
    """Something to be packed: its name, where it is, and its bytes."""

    name: str
    place: str
    size_bytes: int


def pack(items: Sequence[Sized], bins: int) -> list[list[Sized]]:
    """Largest first, each into the lightest bin so far; of bins alike the one with fewer items, then the first."""
    heap = [(0, 0, index) for index in range(min(bins, len(items)))]
    packed: list[list[Sized]] = [[] for _ in heap]
    for item in sorted(items, key=lambda item: (-item.size_bytes, item.name)):
        size_bytes, count, index = heap[0]
        heapq.heapreplace(heap, (size_bytes + item.size_bytes, count + 1, index))
        packed[index].append(item)
    return [sorted(items_of_bin) for items_of_bin in packed]


def partition_key_of(name: str) -> str:
    """The name where it can be a partition's key; else cut or trimmed, and told apart by its hash."""
    if 0 < len(name) <= _KEY_LIMIT_CHARS and name == name.strip() and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_CHARS]
    shown = "".join(character if character.isprintable() else "?" for character in name.strip())
    return f"{shown[: _KEY_LIMIT_CHARS - _DIGEST_CHARS - 1]}~{digest}"
