"""Dispatch latency: from the commit of a plan of one partition to the entry into user code, of an idle worker.

python benchmarks/dispatch_latency.py [--rounds 3] [--quick] [--size 300]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import entries
from fleet import fleet
from launching_noops import launch_noops
from options import Options, alone, say
from peer_processes import PeerProcesses, installed_peers
from reporting import Machine, Report, Rounds, Target, percentile
from servers import Server, rows, server

CONCURRENCY = 10
APART_S = 0.05
IDLE_AFTER_S = 1.5
PATIENCE_S = 30.0
TIMES_BEST_PEER = {"thread": 1.0, "process": 2.0}
P99_MS = 25.0

# Who inserts a job leaves the id of the transaction, so that the moment of its commit can be asked for afterwards.
MARKS = """
CREATE TABLE benchmark_marks (inserted xid8 NOT NULL);
CREATE FUNCTION benchmark_mark() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.benchmark_marks VALUES (pg_current_xact_id());
    RETURN NULL;
END $$;
CREATE TRIGGER benchmark_mark AFTER INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION benchmark_mark();
"""
COMMITS = "SELECT extract(epoch FROM pg_xact_commit_timestamp(inserted::xid))::float8 FROM benchmark_marks ORDER BY 1"

NOTES = (
    "The commit is the server's own moment of it (track_commit_timestamp), the entry is time.time() in the handler or "
    f"step: one machine, one clock. One job at a time, about {1000 * APART_S:g} ms apart, for one worker with "
    f"{CONCURRENCY} slots that has nothing else to do. The first job counts. Everybody listens.",
    "Ours: a Launcher as in the operator, one partition an execution, given to the node that is alive.",
)


def main(options: Options) -> list[Report]:
    """Measure every contender once in each round."""
    size = options.sized(300, quick=20)
    peers, missing = installed_peers(options)
    contenders: dict[str, Callable[[Server, int], list[float]]] = {
        executor: partial(_ours, executor=executor) for executor in TIMES_BEST_PEER
    }
    contenders |= {name: partial(_peer, peer=peer) for name, peer in peers.items()}
    p50: dict[str, list[float]] = {name: [] for name in contenders}
    p99: dict[str, list[float]] = {name: [] for name in contenders}
    with server({"track_commit_timestamp": "on"}) as running:
        machine = Machine.now(running.version)
        for number in range(1, options.rounds + 1):
            for name, measure in contenders.items():
                waits_ms = [1000 * wait for wait in measure(running, size)]
                p50[name].append(percentile(waits_ms, 0.5))
                p99[name].append(percentile(waits_ms, 0.99))
                say(f"  round {number}: {name}: p50 {p50[name][-1]:.2f} ms, p99 {p99[name][-1]:.2f} ms")
    medians = {name: Rounds.of(found) for name, found in p50.items()}
    tails = {name: Rounds.of(found) for name, found in p99.items()}
    return [
        Report(
            name="dispatch_latency",
            title=f"Dispatch latency: plan committed → user code entered, {size} times",
            columns=("what", "p50, ms", "p99, ms"),
            machine=machine,
            rows=[{"what": name, "p50, ms": medians[name], "p99, ms": tails[name]} for name in contenders],
            targets=_targets(medians, tails, list(peers)),
            notes=[*NOTES, *missing],
            decimals=2,
        )
    ]


def _ours(running: Server, size: int, *, executor: str) -> list[float]:
    url = running.fresh_database("ours")
    with fleet(url) as ours:
        rows(url, MARKS.format(table="batch_partitions"))
        file = ours.directory / "entries"
        environment = entries.environment(file, each=True)
        ours.start(1, executor=executor, concurrency=CONCURRENCY, environment=environment)
        time.sleep(IDLE_AFTER_S)
        for number in range(size):
            time.sleep(APART_S + random.uniform(0.0, APART_S / 5))
            launch_noops(ours, f"job-{number}", 1)
        waits = _waits(url, file, size)
    running.drop(url)
    return waits


def _peer(running: Server, size: int, *, peer: PeerProcesses) -> list[float]:
    url = running.fresh_database(peer.facts.name)
    peer.prepare(url)
    rows(url, MARKS.format(table=peer.facts.queue_table))
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "entries"
        with peer.workers(url, 1, CONCURRENCY, entries.environment(file, each=True)):
            time.sleep(IDLE_AFTER_S)
            peer.drip(url, size, APART_S)
            waits = _waits(url, file, size)
    running.drop(url)
    return waits


def _waits(url: str, file: Path, size: int) -> list[float]:
    """Each commit beside its entry. They are far enough apart to be in the same order."""
    deadline = time.monotonic() + PATIENCE_S
    while len(entered := entries.read(file)) < size and time.monotonic() < deadline:
        time.sleep(0.1)
    committed = [moment for (moment,) in rows(url, COMMITS)]
    if not len(entered) == len(committed) == size:
        raise SystemExit(f"{len(committed)} jobs were committed and {len(entered)} entered, of {size}")
    waits = [entry - commit for commit, entry in zip(committed, entered, strict=True)]
    if min(waits) < 0:
        raise SystemExit(f"a job was entered {-min(waits):.6f} s before its commit: they overtook each other")
    return waits


def _targets(medians: Mapping[str, Rounds], tails: Mapping[str, Rounds], peers: list[str]) -> list[Target]:
    targets = []
    if peers:
        best = min(peers, key=lambda name: medians[name].median)
        targets = [
            Target(f"{executor}, p50", medians[executor].median, medians[best].median, f"{best}, p50", times, False)
            for executor, times in TIMES_BEST_PEER.items()
        ]
    return targets + [
        Target(f"{executor}, p99", tails[executor].median, P99_MS, f"{P99_MS:g} ms", at_least=False)
        for executor in TIMES_BEST_PEER
    ]


if __name__ == "__main__":
    alone(main, __doc__)
