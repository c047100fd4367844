"""Plan: from the operator's call to the commit, and the memory that it takes, beside other ways to write as many rows.

python benchmarks/plan.py [--rounds 3] [--quick] [--size N]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import peer_facts
from fleet import fleet
from options import Options, alone, say
from peer_processes import PeerProcesses, installed_peers
from reporting import Machine, Report, Rounds, Target
from servers import Server, rows, server

SIZES = (1_000, 100_000, 1_000_000)
QUICK_SIZES = (100, 1_000)
CONTEXT_BYTES = 100
BULK_PEERS = (peer_facts.PGQUEUER.name, peer_facts.AWA.name)
TIMES_COPY = 1.5
TIMES_MEMORY = 1.5
# Below this much, the growth is Python's own, and comparing it says nothing.
LEAST_MIB = 16.0

NOTES = (
    f"Each way runs in a process of its own, connected before the clock starts; contexts of {CONTEXT_BYTES} bytes are "
    "made one by one while it runs. Memory is what its highest resident size grew by.",
    "ours: a Launcher as in the operator, a generator as the partitioner, two nodes alive, everything in one "
    "transaction. copy and sqlalchemy: the same rows into the same table with its indexes, in one transaction. The "
    "peers: their bulk calls into their own tables, 1,000 jobs and one transaction a call.",
)

Way = Callable[[Server, int], Mapping[str, float]]


def main(options: Options) -> list[Report]:
    """Write each plan in each way once in each round."""
    sizes = (options.size,) if options.size else QUICK_SIZES if options.quick else SIZES
    peers, missing = installed_peers(options)
    ways: dict[str, Way] = {name: partial(_in_our_tables, way=name) for name in ("ours", "copy", "sqlalchemy")}
    ways |= {name: partial(_in_peer, peer=peers[name]) for name in BULK_PEERS if name in peers}
    measured: dict[tuple[int, str], list[Mapping[str, float]]] = {(size, way): [] for size in sizes for way in ways}
    with server() as running:
        machine = Machine.now(running.version)
        for number in range(1, options.rounds + 1):
            for (size, name), found in measured.items():
                found.append(ways[name](running, size))
                seconds, mib = found[-1]["seconds"], found[-1]["grown_mib"]
                say(f"  round {number}: {name}, {size:,}: {seconds:.3f} s, {mib:.0f} MiB")

    def rounds(size: int, way: str, what: str) -> Rounds:
        return Rounds.of(found[what] for found in measured[size, way])

    return [
        Report(
            name="plan",
            title="Plan: from the operator's call to the commit",
            columns=("partitions", "way", "seconds", "partitions/s", "memory, MiB"),
            machine=machine,
            rows=[
                {
                    "partitions": size,
                    "way": way,
                    "seconds": rounds(size, way, "seconds"),
                    "partitions/s": round(size / rounds(size, way, "seconds").median),
                    "memory, MiB": rounds(size, way, "grown_mib"),
                }
                for size, way in measured
            ],
            targets=_targets(sizes, rounds),
            notes=[*NOTES, *(note for note in missing if note.split()[0] in BULK_PEERS)],
            decimals=3,
        )
    ]


def _in_our_tables(running: Server, size: int, *, way: str) -> Mapping[str, float]:
    url = running.fresh_database(way)
    with fleet(url):  # migrates; no worker is started
        running.checkpoint()
        script = Path(__file__).with_name("planning_ways.py")
        command = [sys.executable, str(script), way, url, str(size), str(CONTEXT_BYTES)]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        ((count,),) = rows(url, "SELECT count(*) FROM batch_partitions WHERE status = 'PENDING'")
    if count != size:
        raise SystemExit(f"{way} wrote {count} of {size} partitions")
    running.drop(url)
    return found


def _in_peer(running: Server, size: int, *, peer: PeerProcesses) -> Mapping[str, float]:
    url = running.fresh_database(peer.facts.name)
    peer.prepare(url)
    running.checkpoint()
    found = peer.fill(url, size, context_bytes=CONTEXT_BYTES)
    ((count,),) = rows(url, f"SELECT count(*) FROM {peer.facts.queue_table}")
    if count != size:
        raise SystemExit(f"{peer.facts.name} wrote {count} of {size} jobs")
    running.drop(url)
    return found


def _targets(sizes: tuple[int, ...], rounds: Callable[[int, str, str], Rounds]) -> list[Target]:
    targets = [
        Target(
            f"seconds for {size:,}",
            rounds(size, "ours", "seconds").median,
            rounds(size, "copy", "seconds").median,
            "copy",
            TIMES_COPY,
            at_least=False,
        )
        for size in sizes
    ]
    if len(sizes) > 1:
        fewer, most = sorted(sizes)[-2:]
        targets.append(
            Target(
                f"memory for {most:,}",
                rounds(most, "ours", "grown_mib").median,
                max(LEAST_MIB, rounds(fewer, "ours", "grown_mib").median),
                f"for {fewer:,} (or {LEAST_MIB:g} MiB)",
                TIMES_MEMORY,
                at_least=False,
            )
        )
    return targets


if __name__ == "__main__":
    alone(main, __doc__)
