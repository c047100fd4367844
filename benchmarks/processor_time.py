"""How much processor time processes have used, from Linux's /proc, and how much memory they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from airflow_dbpartition.demo.processes import family

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def families(roots: Iterable[int]) -> set[int]:
    """The living processes of these sessions, and all that descend from them."""
    return {pid for root in roots for pid in family(root)}


def processor_s(roots: Iterable[int]) -> float:
    """Seconds that these processes and all their descendants have used, those that have ended included.

    A process's own time is added to its parent's count of its children when the parent has waited for it, so the sum
    over those that live loses nobody and counts nobody twice. Only orphans that end are lost; neither PostgreSQL nor
    Airflow leaves any.
    """
    return sum(map(_used_s, families(roots)))


def _used_s(pid: int) -> float:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return 0.0  # it has just ended, and is its parent's by now
    fields = stat[stat.rindex(")") + 2 :].split()  # from the third field of proc(5), the state
    return sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime


@dataclass(frozen=True)
class Memory:
    """MiB of one process.

    Attributes:
        resident: all of its pages in memory (RSS), shared ones too.
        proportional: shared pages divided among those who share them (PSS).
        own: what would be freed if it ended (USS).
    """

    resident: float
    proportional: float
    own: float


def memory_mib(pid: int) -> Memory:
    kib = {"Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        if name in kib:
            kib[name] = int(rest.split()[0])
    return Memory(kib["Rss"] / 1024, kib["Pss"] / 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024)
