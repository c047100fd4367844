"""How closely a worker looks at the database: while nobody has work to do, by its heartbeat alone."""

from __future__ import annotations

import math
import random

from airflow_dbpartition.config import Timings
from airflow_dbpartition.repository import HeartbeatReply

IDLE_SWEEP_EVERY_S = 120.0
UNTOLD_S = 30.0


class Attention:
    """When the next look for work is due, and how often to sweep. All moments are of the monotonic clock.

    A heartbeat tells whether any job execution is active and whether any node is silent. With neither, polls and
    sweeps would find nothing, so they rest: new work is announced (NOTIFY), or told by the next heartbeat.

    Args:
        timings: intervals.
        now: when the worker starts.
    """

    def __init__(self, timings: Timings, now: float) -> None:
        self._timings = timings
        self._is_work_active = True
        self._is_any_silent = False
        self._active_at = now
        self._poll_at = 0.0

    def look_now(self) -> None:
        """A slot is free, or work was announced."""
        self._poll_at = 0.0

    def announced(self, now: float) -> None:
        """There may be work, whatever a heartbeat says that was sent before."""
        self._is_work_active = True
        self._active_at = now
        self.look_now()

    def heard(self, reply: HeartbeatReply, sent: float, *, is_told: bool) -> None:
        """A heartbeat was answered.

        Args:
            sent: before it was.
            is_told: new work is announced to this worker. Where it is not, it goes on polling for `UNTOLD_S`, since
                one job is often followed by another.
        """
        self._is_any_silent = reply.is_any_silent
        if reply.is_work_active:
            if not self._is_work_active:
                self.look_now()
            self._is_work_active = True
            self._active_at = max(self._active_at, sent)
        elif sent > self._active_at + (0.0 if is_told else UNTOLD_S):
            self._is_work_active = False

    def found_nothing(self, now: float) -> None:
        self._poll_at = now + self._timings.poll_s * random.uniform(0.8, 1.2)

    def wait(self, now: float, seconds: float) -> None:
        """Look again after so long: the database did not answer."""
        self._poll_at = now + seconds

    @property
    def next_look(self) -> float:
        """When to look for work; inf = not before there is news."""
        return self._poll_at if self._is_work_active or self._poll_at == 0.0 else math.inf

    @property
    def sweep_every_s(self) -> float:
        """How long a turn at sweeping is; the same for all workers, a heartbeat after the last of them knows."""
        busy = self._is_work_active or self._is_any_silent
        return self._timings.sweep_s if busy else max(self._timings.sweep_s, IDLE_SWEEP_EVERY_S)
