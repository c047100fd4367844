"""When user code was entered: a line of a file each time, or only the first time in each process.

Handlers of peers and our own steps use it alike. It needs nothing but the standard library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

FILE_VARIABLE = "BENCHMARK_ENTRIES"
EACH_VARIABLE = "BENCHMARK_EACH_ENTRY"


def environment(file: Path, *, each: bool) -> Mapping[str, str]:
    """Return the variables for a worker that is to write to this file, at each entry or at its first one."""
    return {FILE_VARIABLE: str(file), EACH_VARIABLE: "1" if each else ""}


class _Entries:
    def __init__(self) -> None:
        self._is_wanted = bool(os.environ.get(FILE_VARIABLE))

    def note(self) -> None:
        if not self._is_wanted:
            return
        moment = time.time()
        self._is_wanted = bool(os.environ.get(EACH_VARIABLE))
        # Short appends of several processes do not mix.
        with open(os.environ[FILE_VARIABLE], "a") as file:
            file.write(f"{moment:.6f}\n")


_entries = _Entries()
entered = _entries.note


def read(file: Path) -> list[float]:
    """Return the moments, in order."""
    return sorted(float(line) for line in file.read_text().split()) if file.exists() else []
