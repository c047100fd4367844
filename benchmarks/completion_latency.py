"""From the commit of an execution's last settle to its trigger's event: median, p99 and maximum, beside the target.

A real worker process settles one partition, and ends its execution. The moment of its commit is the server's own
(`track_commit_timestamp`), by the one clock of this machine. The part of it until the end of the execution is committed
is the worker's, and shown beside. The triggers run in this process, as in a triggerer. The cases:

* 1: one wait at a time. The next one sleeps its first interval meanwhile, and does not watch yet.
* 100: one execution ends after the other, while 99 others at least are waited for.
* burst: 100 waits, whose executions end at one moment, as fast as the worker can settle them. It has no target, since
  the worker settles what it has before it ends any execution.
* 1, polling: as 1, but the triggers do not listen, as behind a pooler or on another database than PostgreSQL.

    python benchmarks/completion_latency.py [--rounds 3] [--quick] [--size 100]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from fleet import fleet
from options import Options, alone, say
from reporting import Cell, Machine, Report, Rounds, Target, percentile
from servers import Server, server
from sqlalchemy import Table, func, select, text

from airflow_dbpartition.demo.airflow_processes import connection_fields
from airflow_dbpartition.domain import JobIdentity, Partition
from airflow_dbpartition.repository import JobRepository, NewExecution, sessions

POLLING = "1, polling"
WAITS = 100
TARGET_MS = 50.0
POLL_INTERVAL_S = 5.0
CONN_ID = "latency"
PATIENCE_S = 90.0
APART_S = 0.25  # the ends of case 100
ALONE_S = 2.0  # between the waits of case 1
SETTLED_AFTER_S = 1.0  # the poller has connected, and has looked for the first time


class Arena:
    """One database, one worker with a thread for each partition, and the triggers of this process."""

    def __init__(self, repository: JobRepository) -> None:
        self.repository = repository

    def submit(self, job: str, ends_at: float) -> int:
        new = NewExecution(identity=JobIdentity(job, {}), step_name="end_at")
        plan = [Partition("p", {"moment": ends_at})]
        return self.repository.executions.submit(new, plan, {"p": None}).job_execution_id

    def committed_at(self, table: Table, job_execution_id: int) -> float:
        """When the one row of an execution was completed; nothing changes it after that."""
        query = select(func.extract("epoch", func.pg_xact_commit_timestamp(text("xmin")))).where(
            table.c.job_execution_id == job_execution_id, table.c.status == "COMPLETED"
        )
        with self.repository.engine.connect() as connection:
            return float(connection.execute(query).scalar_one())

    async def waits(self, job: str, begins_at: float, ends_at: float) -> tuple[int, float]:
        """Wait for an execution that ends at a given moment; its id, and when the event came."""
        from airflow_dbpartition.triggers import PartitionCompletionTrigger

        job_execution_id = await asyncio.to_thread(self.submit, job, ends_at)
        await asyncio.sleep(begins_at - time.time())
        trigger = PartitionCompletionTrigger(job_execution_id, CONN_ID, poll_interval_s=POLL_INTERVAL_S)
        async for event in trigger.run():
            came_at = time.time()
            assert event.payload["status"] == "completed", event.payload
            return job_execution_id, came_at
        raise AssertionError("the trigger never fired")


async def one_wait(arena: Arena, runs: int) -> list[tuple[int, float]]:
    begins = [time.time() + 1.0 + number * ALONE_S for number in range(runs)]
    after_s = POLL_INTERVAL_S + SETTLED_AFTER_S
    ends = [begin + after_s + random.uniform(0.0, ALONE_S - SETTLED_AFTER_S - 0.5) for begin in begins]
    return await _all(arena, zip(begins, ends, strict=True))


async def among_others(arena: Arena, runs: int) -> list[tuple[int, float]]:
    begins_at = time.time() + 5.0
    watching_at = begins_at + POLL_INTERVAL_S + 2.0
    ends = [watching_at + number * APART_S + random.uniform(0.0, APART_S / 2) for number in range(runs)]
    other_end = ends[-1] + 5.0
    others = asyncio.gather(*(arena.waits(f"other-{number}", begins_at, other_end) for number in range(WAITS - 1)))
    measured = await _all(arena, ((begins_at, end) for end in ends))
    await others
    return measured


async def burst(arena: Arena, runs: int) -> list[tuple[int, float]]:
    measured: list[tuple[int, float]] = []
    while len(measured) < runs:
        begins_at = time.time() + 5.0
        ends_at = begins_at + POLL_INTERVAL_S + 2.0
        count = min(WAITS, runs - len(measured))
        measured += await _all(arena, [(begins_at, ends_at)] * count, first=len(measured))
    return measured


async def _all(arena: Arena, moments: Any, *, first: int = 0) -> list[tuple[int, float]]:
    waits = [arena.waits(f"job-{number}", *pair) for number, pair in enumerate(moments, first)]
    return list(await asyncio.gather(*waits))


CASES: dict[str, Callable[[Arena, int], Awaitable[list[tuple[int, float]]]]] = {
    "1": one_wait,
    "100": among_others,
    "burst": burst,
    POLLING: one_wait,
}


def measure(arena: Arena, case: str, runs: int) -> list[tuple[float, float]]:
    """The milliseconds of so many runs until the event, and until the end of the execution was committed."""

    async def bounded() -> list[tuple[int, float]]:
        longest_s = PATIENCE_S + runs * (ALONE_S + POLL_INTERVAL_S)
        return await asyncio.wait_for(CASES[case](arena, runs), longest_s)

    tables = arena.repository.tables
    measured = []
    for job, came_at in asyncio.run(bounded()):
        settled_at = arena.committed_at(tables.partitions, job)
        ended_at = arena.committed_at(tables.executions, job)
        measured.append((round(1000 * (came_at - settled_at), 1), round(1000 * (ended_at - settled_at), 1)))
    return measured


@contextmanager
def _arena(running: Server) -> Iterator[Arena]:
    url = running.fresh_database("latency")
    os.environ[f"AIRFLOW_CONN_{CONN_ID.upper()}"] = json.dumps(connection_fields(url))
    with fleet(url) as workers:
        workers.start(1, executor="thread", concurrency=2 * WAITS, options={"--grace": 0})
        yield Arena(workers.repository)
    running.drop(url)


def main(options: Options) -> list[Report]:
    """Measure every case; the runs are spread over the rounds."""
    runs = max(1, options.sized(100, quick=6) // options.rounds)
    found: dict[str, list[list[tuple[float, float]]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as home, server({"track_commit_timestamp": "on"}) as running:
        machine = Machine.now(running.version)
        os.environ["AIRFLOW_HOME"] = home
        os.environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = f"sqlite:///{home}/never-made.db"
        os.environ["AIRFLOW__LOGGING__LOGGING_LEVEL"] = "WARNING"
        from airflow_dbpartition import triggers  # noqa: F401 - slow, so not while one measures

        for number in range(1, options.rounds + 1):
            for case, measured in found.items():
                say(f"  round {number}: {case}")
                with _arena(running) as arena, _listening(case != POLLING):
                    measured.append(measure(arena, case, runs))
    return [
        Report(
            name="completion_latency",
            title=f"Completion latency: last settle committed → trigger's event, {runs * options.rounds} times",
            columns=("waits", "p50, ms", "p99, ms", "maximum, ms", "of p50, until the execution's end, ms"),
            machine=machine,
            rows=[_row(case, measured) for case, measured in found.items()],
            targets=[
                Target("one wait, p50", _p50(found["1"]).median, TARGET_MS, f"{TARGET_MS:g} ms", at_least=False),
                Target("one of 100, p50", _p50(found["100"]).median, TARGET_MS, f"{TARGET_MS:g} ms", at_least=False),
                Target("polling, p50", _p50(found[POLLING]).median, 1000 * POLL_INTERVAL_S, "one poll", at_least=False),
            ],
            notes=[
                "The commit is the server's own moment of it (track_commit_timestamp), the event is time.time() in "
                f"this process, which stands for a triggerer. Polls are {POLL_INTERVAL_S:g} s apart; all but one case "
                "listen.",
                "p50 is the median of the rounds' own; p99 and maximum are of all runs.",
            ],
        )
    ]


def _listening(listens: bool) -> AbstractContextManager[object]:
    return nullcontext() if listens else patch.object(sessions, "is_own", return_value=False)


def _p50(measured: list[list[tuple[float, float]]]) -> Rounds:
    return Rounds.of(statistics.median(until_event for until_event, _ in one) for one in measured)


def _row(case: str, measured: list[list[tuple[float, float]]]) -> dict[str, Cell]:
    pairs = [pair for one in measured for pair in one]
    heard = [until_event for until_event, _ in pairs]
    return {
        "waits": case,
        "p50, ms": _p50(measured),
        "p99, ms": percentile(heard, 0.99),
        "maximum, ms": max(heard),
        "of p50, until the execution's end, ms": statistics.median(until_ended for _, until_ended in pairs),
    }


if __name__ == "__main__":
    alone(main, __doc__)
