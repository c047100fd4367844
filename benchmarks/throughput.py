"""Work per second: no-op partitions, beside peers and the bare statements.

python benchmarks/throughput.py [--rounds 3] [--quick] [--size 20000]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import entries
import peer_facts
import pgbench
import psycopg2
from fleet import fleet
from launching_noops import launch_noops
from options import Options, alone, say
from peer_processes import PeerProcesses, installed_peers
from reporting import Cell, Machine, Report, Rounds, Target
from servers import Server, libpq_url, rows, server

OURS_FINISHED = "SELECT count(*) FROM batch_partitions WHERE status = 'COMPLETED'"
WORKERS = (1, 2)
CONCURRENCIES = {"thread": (10, 100), "process": (2, 4, 10)}
PEER_CONCURRENCIES = {"procrastinate": (10, 30), "pgqueuer": (10, 100), "awa": (10, 100), "chancy": (10, 100)}
BATCHES = (10, 100)
PATIENCE_S = 300.0
LOOK_EVERY_S = 0.02

NOTES = (
    "From the first entry into user code of any worker to the moment at which the database says that all are done, "
    "asked at most every 20 ms. Processes have started and imported everything before that.",
    "Our workers are idle and get the plan in one transaction, assigned round-robin, as by the operator. The peers' "
    "jobs are there before their workers start, and their tables are analysed.",
    "fsync, synchronous_commit and full_page_writes are on; each run has a fresh database; contenders take turns in "
    "each round. What is done is counted in each one's own tables: a run that loses any is an error.",
    "pgqueuer's concurrency is its batch size, with any number of jobs at once. chancy polls eagerly.",
    f"pgbench runs on {pgbench.CLIENTS} connections, prepared, on our own tables, with no Python.",
)


@dataclass(frozen=True)
class Contender:
    """One line of the table."""

    name: str
    workers: int
    concurrency: int
    durable: str
    fenced: str
    run: Callable[[Server, int], float]

    @property
    def cells(self) -> dict[str, Cell]:
        return {
            "what": self.name,
            "workers": self.workers,
            "concurrency or batch": self.concurrency,
            "settles are committed": self.durable,
            "fenced": self.fenced,
        }


def main(options: Options) -> list[Report]:
    """Measure every contender once in each round."""
    size = options.sized(20_000, quick=400)
    peers, missing = installed_peers(options)
    with server() as running:
        machine = Machine.now(running.version)
        contenders = [*_ours(), *_peers(peers), *_statements()]
        measured: dict[Contender, list[float]] = {contender: [] for contender in contenders}
        for number in range(1, options.rounds + 1):
            for contender, rates in measured.items():
                rates.append(contender.run(running, size))
                say(
                    f"  round {number}: {contender.name}, {contender.workers} × {contender.concurrency}: "
                    f"{rates[-1]:,.0f}/s"
                )
    rates_of = {contender: Rounds.of(rates) for contender, rates in measured.items()}
    return [
        Report(
            name="throughput",
            title=f"Work per second: {size:,} no-op partitions",
            columns=("what", "workers", "concurrency or batch", "partitions/s", "settles are committed", "fenced"),
            machine=machine,
            rows=[{**contender.cells, "partitions/s": rate} for contender, rate in rates_of.items()],
            targets=_targets(rates_of),
            notes=[*NOTES, *missing],
            decimals=0,
        )
    ]


def _ours() -> list[Contender]:
    return [
        Contender(executor, workers, concurrency, "yes", "yes, by node and version", partial(
            _run_ours, executor=executor, workers=workers, concurrency=concurrency
        ))
        for executor, concurrencies in CONCURRENCIES.items()
        for workers in WORKERS
        for concurrency in concurrencies
    ]  # fmt: skip


def _peers(peers: Mapping[str, PeerProcesses]) -> list[Contender]:
    return [
        Contender(name, workers, concurrency, peer.facts.durable, peer.facts.fenced, partial(
            _run_peer, peer=peer, workers=workers, concurrency=concurrency
        ))
        for name, peer in peers.items()
        for workers in WORKERS
        for concurrency in PEER_CONCURRENCIES[name]
    ]  # fmt: skip


def _statements() -> list[Contender]:
    return [
        Contender("pgbench", pgbench.CLIENTS, batch, "yes", "yes", partial(_run_statements, batch=batch))
        for batch in BATCHES
    ]


def _run_ours(running: Server, size: int, *, executor: str, workers: int, concurrency: int) -> float:
    url = running.fresh_database("ours")
    with fleet(url) as ours:
        file = ours.directory / "entries"
        ours.start(
            workers, executor=executor, concurrency=concurrency, environment=entries.environment(file, each=False)
        )
        running.checkpoint()
        launch_noops(ours, "noops", size)
        ended = _when_finished(url, OURS_FINISHED, size)
        rate = size / (ended - entries.read(file)[0])
    running.drop(url)
    return rate


def _run_peer(running: Server, size: int, *, peer: PeerProcesses, workers: int, concurrency: int) -> float:
    url = running.fresh_database(peer.facts.name)
    peer.prepare(url)
    peer.fill(url, size)
    rows(url, "VACUUM ANALYZE")
    running.checkpoint()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "entries"
        with peer.workers(url, workers, concurrency, entries.environment(file, each=False)):
            ended = _when_finished(url, peer.facts.finished, size)
        rate = size / (ended - entries.read(file)[0])
    running.drop(url)
    return rate


def _run_statements(running: Server, size: int, *, batch: int) -> float:
    url = running.fresh_database("statements")
    each = batch * pgbench.CLIENTS
    size = max(each, size // each * each)
    with fleet(url) as ours:
        launch_noops(ours, "noops", size)
        rows(url, "VACUUM ANALYZE")
        running.checkpoint()
        rate = pgbench.partitions_per_second(url, size, batch)
    _when_finished(url, OURS_FINISHED, size)
    running.drop(url)
    return rate


def _when_finished(url: str, finished: str, size: int) -> float:
    """Wait until so many are done. Asking takes at most a tenth of the time, whatever it costs with this schema."""
    connection: Any = psycopg2.connect(libpq_url(url))
    connection.autocommit = True
    deadline = time.time() + PATIENCE_S
    try:
        with connection.cursor() as cursor:
            while True:
                asked = time.time()
                cursor.execute(finished)
                ((count,),) = cursor.fetchall()
                if count >= size:
                    break
                if asked > deadline:
                    raise SystemExit(f"only {count} of {size} were done after {PATIENCE_S:g} s")
                time.sleep(max(LOOK_EVERY_S, 9 * (time.time() - asked)))
    finally:
        connection.close()
    if count > size:
        raise SystemExit(f"{count} were done, of {size}")
    return asked


def _targets(rates: Mapping[Contender, Rounds]) -> list[Target]:
    def best(name: str, **wanted: int) -> float | None:
        found = [
            rate.median
            for contender, rate in rates.items()
            if contender.name == name and all(getattr(contender, key) == value for key, value in wanted.items())
        ]
        return max(found, default=None)

    targets = []

    def compare(ours: str, theirs: str, factor: float, mine: Mapping[str, int], other: Mapping[str, int]) -> None:
        measured, limit = best(ours, **mine), best(theirs, **other)
        if measured is not None and limit is not None:
            targets.append(Target(_words(ours, mine), measured, limit, _words(theirs, other), factor))

    compare("thread", "procrastinate", 10, {}, {})
    for concurrency in CONCURRENCIES["thread"]:
        for workers in WORKERS:
            same = {"workers": workers, "concurrency": concurrency}
            for fenced in (peer_facts.AWA.name, peer_facts.CHANCY.name):
                compare("thread", fenced, 1, same, same)
    compare("thread", "pgqueuer", 1, {}, {"concurrency": 10})
    compare("thread", "pgbench", 0.5, {}, {"concurrency": 10})
    compare("process", "procrastinate", 3, {}, {})
    return targets


def _words(name: str, wanted: Mapping[str, int]) -> str:
    workers = f"{wanted['workers']} × " if "workers" in wanted else ""
    given = f"{workers}{wanted['concurrency']}" if "concurrency" in wanted else "best"
    return f"{name}, {given}"


if __name__ == "__main__":
    alone(main, __doc__)
