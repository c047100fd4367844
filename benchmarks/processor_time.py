"""How much processor time processes have used, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from airflow_dbpartition.demo.processes import family

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_s(roots: Iterable[int]) -> float:
    """Seconds that these processes and all their descendants have used, those that have ended included.

    A process's own time is added to its parent's count of its children when the parent has waited for it, so the sum
    over those that live loses nobody and counts nobody twice. Only orphans that end are lost; neither PostgreSQL nor
    Airflow leaves any.
    """
    return sum(map(_used_s, {pid for root in roots for pid in family(root)}))


def _used_s(pid: int) -> float:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return 0.0  # it has just ended, and is its parent's by now
    fields = stat[stat.rindex(")") + 2 :].split()  # from the third field of proc(5), the state
    return sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime
