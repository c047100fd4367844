"""chancy, with asynchronous jobs and eager polling. On asyncio's own loop: its eager polling needs that."""

from __future__ import annotations

import logging
from typing import Any

from chancy import Chancy, Job, Queue, Worker
from commands import Peer, run
from entries import entered


async def noop(**_context: Any) -> None:
    entered()


class ChancyPeer(Peer):
    async def prepare(self) -> None:
        async with self._chancy() as chancy:
            await chancy.migrate()

    async def open(self) -> None:
        self._open = self._chancy()
        await self._open.__aenter__()

    async def enqueue(self, contexts: list[dict[str, Any]]) -> None:
        jobs = [_job(one) for one in contexts]
        async for _references in self._open.push_many(jobs, batch_size=len(jobs)):
            pass

    async def enqueue_one(self, one: dict[str, Any]) -> None:
        await self._open.push(_job(one))

    async def close(self) -> None:
        await self._open.__aexit__(None, None, None)

    async def work(self, concurrency: int) -> None:
        async with self._chancy() as chancy:
            queue = Queue("default", concurrency=concurrency, executor=Chancy.Executor.Async, eager_polling=True)
            await chancy.declare(queue, upsert=True)
            async with Worker(chancy) as worker:
                await worker.wait_for_shutdown()

    def _chancy(self) -> Chancy:
        return Chancy(self.url, log=logging.getLogger("quiet"))


def _job(one: dict[str, Any]) -> Job:
    return Job(func="with_chancy.noop", kwargs=one)


if __name__ == "__main__":
    run(ChancyPeer)
