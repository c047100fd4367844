"""What every partition and every peer's job is given: equally much for all. Only the standard library."""

from __future__ import annotations

import json


def context(number: int, size_bytes: int) -> dict[str, object]:
    """Return a small object that is so long as JSON, or as short as it can be."""
    bare: dict[str, object] = {"number": number, "pad": ""}
    return {**bare, "pad": "x" * (size_bytes - len(json.dumps(bare)))}
