"""awa, by its asynchronous client: COPY to fill, insert for one."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

from awa import AsyncClient
from commands import Peer, run
from entries import entered

QUEUE = "default"
CONNECTIONS = 10


@dataclass
class Noop:
    """The arguments of a job; their class names its kind."""

    number: int
    pad: str


class Awa(Peer):
    async def prepare(self) -> None:
        await self.open()
        await self._client.migrate()
        self._client.task(Noop, queue=QUEUE)(_noop)
        await self._client.start([(QUEUE, 1)])  # its first worker is who turns on the storage that COPY needs
        await self._client.shutdown()
        await self.close()

    async def open(self) -> None:
        self._client = AsyncClient(self.url, max_connections=CONNECTIONS)

    async def enqueue(self, contexts: list[dict[str, Any]]) -> None:
        await self._client.enqueue_many_copy([Noop(**one) for one in contexts], queue=QUEUE)

    async def enqueue_one(self, one: dict[str, Any]) -> None:
        await self._client.insert(Noop(**one), queue=QUEUE)

    async def close(self) -> None:
        await self._client.close()

    async def work(self, concurrency: int) -> None:
        await self.open()
        self._client.task(Noop, queue=QUEUE)(_noop)
        done = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
        await self._client.start([(QUEUE, concurrency)])
        await done.wait()
        await self._client.shutdown()


async def _noop(_job: Any) -> None:
    entered()


if __name__ == "__main__":
    run(Awa)
