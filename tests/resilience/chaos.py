"""A fleet that is killed, frozen, stopped, joined and restarted at random, from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from airflow_dbpartition.demo.processes import send_signal
from tests.resilience.ledgers import STEPS
from tests.worker.processes import Fleet, Node, wait_until

SEED_VARIABLE = "DBPARTITION_RESILIENCE_SEED"
FROZEN_FOR = (0.5, 1.5)  # times remove_after: most are buried alive, some have just been


def new_seed() -> int:
    """The seed that is asked for, or a new one."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(10**6))


def let_time_pass(seconds: float) -> None:
    """What is waited for is that nothing happens, or that harm lasts."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, "time passes", timeout_s=seconds + 5)


@dataclass
class _Frozen:
    node: Node
    pids: list[int]
    thaw_at: float


@dataclass
class Chaos:
    """Does harm to a fleet until it is told to stop, and remembers to whom.

    Args:
        fleet: whose workers are harmed; those that die are replaced.
        size: workers that are kept running.
        rng: from the seed.
        pause_s: between two harms, on average.
    """

    fleet: Fleet
    size: int
    rng: random.Random
    pause_s: float
    concurrency: int = 2
    done: Counter[str] = field(default_factory=Counter)
    harmed: set[str] = field(default_factory=set)  # nodes by name
    _alive: list[Node] = field(default_factory=list)
    _frozen: list[_Frozen] = field(default_factory=list)
    _restart_at: list[float] = field(default_factory=list)
    _started: int = 0

    def begin(self, *, late: int = 1) -> None:
        """Start the fleet, all but the late ones."""
        for _ in range(self.size - late):
            self._start()
        for node in self._alive:
            node.wait_until_live()
        now = time.monotonic()
        self._restart_at = [now + self.rng.uniform(1, 5) for _ in range(late)]

    def run_until(self, over: Callable[[], bool], *, timeout_s: float) -> None:
        """Do harm until the condition holds; leave a fleet behind that can work."""
        deadline = time.monotonic() + timeout_s
        next_harm = time.monotonic() + self.pause_s
        while not over():
            now = time.monotonic()
            assert now < deadline, f"not over after {timeout_s:g} s of chaos: {self}"
            self._thaw(now)
            self._notice_ends(now)
            self._restart(now)
            if now >= next_harm:
                self._harm(now)
                next_harm = now + self.rng.uniform(0.5, 1.5) * self.pause_s
            let_time_pass(0.05)
        self._thaw(float("inf"))
        self._restart(float("inf"))

    def __str__(self) -> str:
        return f"{sum(self.done.values())} harms {dict(sorted(self.done.items()))}, {self._started} workers started"

    # --- harms -------------------------------------------------------------------------------------------------

    def _harm(self, now: float) -> None:
        able = [node for node in self._alive if node not in [frozen.node for frozen in self._frozen]]
        if len(able) <= 2:  # somebody must be left to go on
            return
        node = self.rng.choice(able)
        harms = (
            self._kill_supervisor,
            self._kill_child,
            self._kill_family,
            self._freeze_supervisor,
            self._freeze_child,
            self._freeze_family,
            self._terminate,
            self._terminate_twice,
        )
        harm = self.rng.choice(harms)
        with contextlib.suppress(ProcessLookupError):
            harm(node, now)
            self.harmed.add(node.name)
            self.done[harm.__name__.strip("_")] += 1

    def _kill_supervisor(self, node: Node, now: float) -> None:
        node.send(signal.SIGKILL)
        self._gone(node, now)

    def _kill_family(self, node: Node, now: float) -> None:
        for pid in node.process.members():
            send_signal(pid, signal.SIGKILL)
        self._gone(node, now)

    def _kill_child(self, node: Node, now: float) -> None:
        send_signal(self._child_of(node), signal.SIGKILL)

    def _freeze_supervisor(self, node: Node, now: float) -> None:
        self._freeze(node, [node.pid], now)

    def _freeze_child(self, node: Node, now: float) -> None:
        self._freeze(node, [self._child_of(node)], now)

    def _freeze_family(self, node: Node, now: float) -> None:
        self._freeze(node, node.process.members(), now)

    def _terminate(self, node: Node, now: float) -> None:
        node.send(signal.SIGTERM)
        self._gone(node, now)

    def _terminate_twice(self, node: Node, now: float) -> None:
        node.send(signal.SIGTERM)
        node.send(signal.SIGINT)
        self._gone(node, now)

    def _child_of(self, node: Node) -> int:
        children = node.children()
        if not children:
            raise ProcessLookupError
        return self.rng.choice(sorted(children))

    def _freeze(self, node: Node, pids: list[int], now: float) -> None:
        for pid in pids:
            send_signal(pid, signal.SIGSTOP)
        self._frozen.append(
            _Frozen(node, pids, now + self.rng.uniform(*FROZEN_FOR) * self.fleet.timings.remove_after_s)
        )

    def _thaw(self, now: float) -> None:
        for frozen in [frozen for frozen in self._frozen if frozen.thaw_at <= now]:
            self._frozen.remove(frozen)
            for pid in frozen.pids:
                send_signal(pid, signal.SIGCONT)

    def _notice_ends(self, now: float) -> None:
        """A worker whose threads were frozen for too long ends itself."""
        for node in [node for node in self._alive if node.process.exit_code is not None]:
            self._gone(node, now)

    def _gone(self, node: Node, now: float) -> None:
        self._alive.remove(node)
        self._restart_at.append(now + self.rng.uniform(0, 3))

    def _restart(self, now: float) -> None:
        for moment in [moment for moment in self._restart_at if moment <= now]:
            self._restart_at.remove(moment)
            self._start()

    def _start(self) -> None:
        name = f"n{self._started}"
        self._started += 1
        options: dict[str, Any] = {
            "grace": self.rng.choice((0.2, 10.0)),
            # Threads outlive a freeze for a moment: the zombies that processes hardly ever are.
            "executor": "thread" if self._started % 3 == 0 else "process",
        }
        self._alive.append(self.fleet.start(name, imports=STEPS, concurrency=self.concurrency, wait=False, **options))
