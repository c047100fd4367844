"""Claims that wait in a worker for a slot, and how many of them there should be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice, takewhile

from airflow_dbpartition.domain import Claim

ClaimKey = tuple[int, int]  # (step_execution_id, version)

# What it takes to settle some partitions and claim others, with room for a database that is not next door.
_CYCLE_S = 0.02
_MOST_AHEAD = 100
_RUNS_TO_JUDGE_BY = 20
_WEIGHT_OF_NEWEST = 0.1
_PATIENCE_S = 0.5


def key_of(claim: Claim) -> ClaimKey:
    return (claim.step_execution_id, claim.version)


class Feed:
    """Claims that were taken before there was a slot for them.

    A slot that is free has nothing to do until the next claim is answered. That is little beside partitions of seconds,
    and most of the time of partitions that take less than a claim. So, as by Little's law, as many claims wait as all
    slots together run through while others are fetched: none where partitions take a second, and none before it is
    known what they take. If one of them takes long after all, those that wait behind it are given back.

    Args:
        slots: partitions run at once.
        prefetch: claims that are to wait in any case, for as long as it takes.
        clock: seconds.
    """

    def __init__(self, slots: int, prefetch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._prefetch = prefetch
        self._clock = clock
        self._waiting: dict[ClaimKey, tuple[Claim, float]] = {}
        self._runs = 0
        self._mean_s = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wanted(self) -> int:
        """How many claims should wait."""
        return self._prefetch + self._ahead

    @property
    def _ahead(self) -> int:
        if self._runs < _RUNS_TO_JUDGE_BY:
            return 0
        return min(_MOST_AHEAD, int(self._slots * _CYCLE_S / max(self._mean_s, 1e-6)))

    @property
    def depth(self) -> int:
        """How many claims one slot that cannot be reached at once may have: the one that it runs, and its next ones."""
        return 1 + self._ahead // self._slots

    def ran(self, seconds: float) -> None:
        """A partition has ended, that long after its step was entered."""
        self._runs += 1
        if self._runs == 1:
            self._mean_s = seconds
        else:
            self._mean_s += _WEIGHT_OF_NEWEST * (seconds - self._mean_s)

    def add(self, claim: Claim) -> None:
        self._waiting[key_of(claim)] = (claim, self._clock())

    def next(self) -> Claim | None:
        """What `take` would return."""
        return next((claim for claim, _ in self._waiting.values()), None)

    def take(self) -> Claim | None:
        """The one that has waited longest."""
        for key in self._waiting:
            return self._waiting.pop(key)[0]
        return None

    def remove(self, key: ClaimKey) -> bool:
        """Whether it was waiting, and so never begins."""
        return self._waiting.pop(key, None) is not None

    def withdraw(self) -> list[ClaimKey]:
        """Take back all of them."""
        keys = list(self._waiting)
        self._waiting.clear()
        return keys

    def withdraw_overdue(self) -> list[ClaimKey]:
        """Take back those that only wait since others were expected to be short, and have waited for too long."""
        surplus = islice(self._waiting.items(), self._prefetch, None)  # the oldest first
        overdue = [key for key, _ in takewhile(lambda waiting: self.is_overdue(waiting[1][1]), surplus)]
        for key in overdue:
            del self._waiting[key]
            self.was_wrong()
        return overdue

    def is_overdue(self, since: float) -> bool:
        """Whether a claim that came then has waited for too long."""
        return self._clock() - since > _PATIENCE_S

    def was_wrong(self) -> None:
        """What was known of how long partitions take is not so."""
        self._runs = 0
