"""The watcher behind `Guard`: reads what to guard from stdin, and at its end ends what is still guarded."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable

from airflow_dbpartition.demo.processes import GUARD_GRACE_S, POLL_INTERVAL_S, family, send_signal


def main(lines: Iterable[str]) -> None:
    """Read `add PID SIGNAL` and `remove PID` lines; when they stop, nobody is left to look after the processes."""
    guarded: dict[int, int] = {}
    for line in lines:
        verb, pid, *rest = line.split()
        if verb == "add":
            guarded[int(pid)] = int(rest[0])
        else:
            guarded.pop(int(pid), None)
    end(guarded)


def end(guarded: dict[int, int]) -> None:
    """Signal each process, wait, and kill what is left of its family."""
    families = {pid: set(family(pid)) for pid in guarded}
    for pid, signal_number in guarded.items():
        send_signal(pid, signal_number)
    deadline = time.monotonic() + GUARD_GRACE_S
    while any(pid in family(pid) for pid in guarded) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    for pid in guarded:
        # After a clean end only orphans of the session are left; otherwise all that was seen before.
        still_there = pid in family(pid)
        for member in {*family(pid), *(families[pid] if still_there else ())}:
            send_signal(member, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.stdin)
