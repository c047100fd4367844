"""How much memory a process holds now, from Linux's /proc/<pid>/smaps_rollup."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """MiB.

    Attributes:
        resident: all that is mapped and present (RSS); what several processes share counts whole.
        proportional: what is shared counts by its part (PSS), so that the sum of all processes is what they take.
        private: what nobody else has mapped: it is free again when this process ends.
    """

    resident: float
    proportional: float
    private: float


def memory_of(pid: int) -> Memory:
    """Ask the kernel."""
    text = Path("/proc", str(pid), "smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s*(\d+) kB", text, re.MULTILINE)}
    return Memory(kib["Rss"] / 1024, kib["Pss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)
