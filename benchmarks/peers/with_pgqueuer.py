"""pgqueuer, with asyncpg on uvloop as its own command line runs it, and its own autovacuum settings."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import asyncpg
import uvloop
from commands import Peer, run
from entries import entered
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


class PgQueuerPeer(Peer):
    async def prepare(self) -> None:
        await self.open()
        await self._queries.install()
        await self._queries.optimize_autovacuum()
        await self.close()

    async def open(self) -> None:
        self._connection = await asyncpg.connect(self.url)
        self._queries = Queries(AsyncpgDriver(self._connection))

    async def enqueue(self, contexts: list[dict[str, Any]]) -> None:
        payloads: list[bytes | None] = [json.dumps(one).encode() for one in contexts]
        await self._queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))

    async def enqueue_one(self, one: dict[str, Any]) -> None:
        await self._queries.enqueue("noop", json.dumps(one).encode())

    async def close(self) -> None:
        await self._connection.close()

    async def work(self, concurrency: int) -> None:
        """`concurrency` is its batch size: how many it claims at once; it bounds nothing else by default."""
        queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.url)))
        queuer.entrypoint("noop")(_noop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queuer.shutdown.set)
        await queuer.run(batch_size=concurrency)


async def _noop(job: Job) -> None:
    json.loads(job.payload or b"{}")
    entered()


if __name__ == "__main__":
    uvloop.install()
    run(PgQueuerPeer)
