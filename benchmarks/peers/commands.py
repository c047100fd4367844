"""The commands that every peer's script understands, so that one benchmark can drive them all.

prepare                     create the peer's tables
fill COUNT BYTES [BATCH]    enqueue so many jobs by the peer's bulk call; prints the seconds and the growth in memory
drip COUNT SECONDS          enqueue one at a time, about so far apart
work CONCURRENCY            say "ready" once all is imported, wait for a line, work until SIGTERM
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

from contexts import context
from peak_memory import peak_mib

BATCH = 1000


class Peer(ABC):
    """One job queue, at the settings that its own documentation recommends."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    async def prepare(self) -> None:
        """Create the tables in an empty database."""

    @abstractmethod
    async def open(self) -> None:
        """Connect as one who enqueues."""

    @abstractmethod
    async def enqueue(self, contexts: list[dict[str, Any]]) -> None:
        """Enqueue some at once, in one transaction."""

    async def enqueue_one(self, one: dict[str, Any]) -> None:
        """Enqueue a single job, as most callers do."""
        await self.enqueue([one])

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connections."""

    @abstractmethod
    async def work(self, concurrency: int) -> None:
        """Run jobs until SIGTERM."""


async def _fill(peer: Peer, count: int, size_bytes: int, batch: int) -> None:
    await peer.open()
    before_mib = peak_mib()
    begin = time.perf_counter()
    for first in range(0, count, batch):
        await peer.enqueue([context(number, size_bytes) for number in range(first, min(first + batch, count))])
    seconds = time.perf_counter() - begin
    grown_mib = peak_mib() - before_mib
    await peer.close()
    print(json.dumps({"seconds": seconds, "grown_mib": grown_mib}), flush=True)


async def _drip(peer: Peer, count: int, apart_s: float) -> None:
    await peer.open()
    for number in range(count):
        await asyncio.sleep(apart_s + random.uniform(0.0, apart_s / 5))
        await peer.enqueue_one(context(number, 0))
    await peer.close()


async def _work(peer: Peer, concurrency: int) -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await peer.work(concurrency)


def run(kind: type[Peer]) -> None:
    """Read the command line: a libpq URL, a command and its numbers."""
    url, command, *words = sys.argv[1:]
    peer = kind(url)
    if command == "prepare":
        asyncio.run(peer.prepare())
    elif command == "fill":
        count, size_bytes, batch = (*map(int, words), BATCH)[:3]
        asyncio.run(_fill(peer, count, size_bytes, batch))
    elif command == "drip":
        asyncio.run(_drip(peer, int(words[0]), float(words[1])))
    elif command == "work":
        asyncio.run(_work(peer, int(words[0])))
    else:
        raise SystemExit(f"unknown command {command!r}:{__doc__}")
