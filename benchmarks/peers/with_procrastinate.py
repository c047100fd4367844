"""procrastinate, with its psycopg connector and asynchronous jobs; it listens by default."""

from __future__ import annotations

import logging
from typing import Any

import procrastinate
from commands import Peer, run
from entries import entered


class Procrastinate(Peer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        logging.getLogger("procrastinate").setLevel(logging.WARNING)
        self._app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
        self._task = self._app.task(name="noop")(_noop)

    async def prepare(self) -> None:
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self._app.open_async()

    async def enqueue(self, contexts: list[dict[str, Any]]) -> None:
        await self._task.batch_defer_async(*contexts)

    async def enqueue_one(self, one: dict[str, Any]) -> None:
        await self._task.defer_async(**one)

    async def close(self) -> None:
        await self._app.close_async()

    async def work(self, concurrency: int) -> None:
        async with self._app.open_async():
            await self._app.run_worker_async(concurrency=concurrency)


async def _noop(**_context: Any) -> None:
    entered()


if __name__ == "__main__":
    run(Procrastinate)
