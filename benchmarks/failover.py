"""From the SIGKILL of a worker to its partition running elsewhere: median and maximum, beside the threshold.

Each run has a worker of its own that is killed (the supervisor alone: its child must die with it) in the middle of its
one partition, and shares one survivor. Measured from the signal to the moment at which the step is entered on the
survivor, by the one clock of this machine. Several victims are killed in one go, apart from each other by a random
part of a heartbeat, so that the phase of the heartbeat is not always the same.

    python benchmarks/failover.py [--runs 20] [--profile default] [--profile fast] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard, SessionProcess, log_tail
from airflow_dbpartition.domain import JobIdentity, JobSettings, Partition, TransferPolicy
from airflow_dbpartition.repository import JobRepository, NewExecution

HERE = Path(__file__).resolve().parent
PROFILES = {
    "default": Timings(),
    "fast": Timings(heartbeat_s=0.5, unreachable_after_s=2.0, remove_after_s=4.0),
}
AT_ONCE = 5
PATIENCE_S = 90.0


class Arena:
    """One PostgreSQL, one survivor, and as many victims as are asked for."""

    def __init__(self, directory: Path, url: str, timings: Timings, guard: Guard) -> None:
        self.directory = directory
        self.url = url
        self.timings = timings
        self.guard = guard
        self.repository = JobRepository.connect(DatabaseConfig(url=url))
        self.trace = directory / "trace"
        self.trace.touch()

    def start(self, name: str, concurrency: int) -> SessionProcess:
        times = self.timings
        options: dict[str, Any] = {
            "--import": HERE / "steps.py",
            "--node-prefix": name,
            "--concurrency": concurrency,
            "--heartbeat": times.heartbeat_s,
            "--unreachable-after": times.unreachable_after_s,
            "--remove-after": times.remove_after_s,
        }
        process = SessionProcess(
            [
                sys.executable,
                "-m",
                "airflow_dbpartition.cli",
                "worker",
                *(str(w) for pair in options.items() for w in pair),
            ],
            log_path=self.directory / f"{name}.log",
            environment={**os.environ, "DBPARTITION_DATABASE_URL": self.url},
            cwd=self.directory,
        )
        self.guard.add(process)
        deadline = time.monotonic() + PATIENCE_S
        while not self.node_id(name):
            if process.exit_code is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{log_tail(process.log_path)}")
            time.sleep(0.05)
        return process

    def node_id(self, name: str) -> str | None:
        nodes = self.repository.nodes.all()
        return next((node.node_id for node in nodes if node.node_id.startswith(f"{name}-")), None)

    def submit(self, job: str, owner: str) -> int:
        node_id = self.node_id(owner)
        launched = self.repository.executions.submit(
            NewExecution(
                identity=JobIdentity(job, {}),
                step_name="hold",
                settings=JobSettings(transferable=TransferPolicy.ALWAYS.value, stealing=False),
            ),
            [Partition("p", {"trace": str(self.trace)})],
            {"p": node_id},
        )
        return launched.job_execution_id

    def entered(self) -> dict[str, float]:
        """When the step was entered, by node id and number of the entry on it."""
        rows = [line.split() for line in self.trace.read_text().splitlines()]
        return {f"{node_id}/{index}": float(moment) for index, (_, _, node_id, moment) in enumerate(rows)}

    def entries_on(self, prefix: str) -> list[float]:
        return [moment for node, moment in self.entered().items() if node.startswith(f"{prefix}-")]


def measure(arena: Arena, runs: int) -> list[float]:
    """Kill so many victims, some at a time, and return the seconds that each took."""
    survivor = arena.start("survivor", concurrency=AT_ONCE)
    measured: list[float] = []
    while len(measured) < runs:
        measured += _one_go(arena, first=len(measured), count=min(AT_ONCE, runs - len(measured)))
        print(f"  {len(measured)}/{runs}", file=sys.stderr, flush=True)
    survivor.send(signal.SIGTERM)
    survivor.wait(timeout_s=10)
    return measured


def _one_go(arena: Arena, *, first: int, count: int) -> list[float]:
    names = [f"victim{first + number}" for number in range(count)]
    victims = {name: arena.start(name, concurrency=1) for name in names}
    jobs = [arena.submit(f"job of {name}", name) for name in names]
    _wait(lambda: all(arena.entries_on(name) for name in names), "every victim is in the middle of its partition")
    before = len(arena.entries_on("survivor"))
    kills = []
    for name in names:
        time.sleep(random.uniform(0, arena.timings.heartbeat_s))
        kills.append(time.time())
        victims[name].send(signal.SIGKILL)
    _wait(lambda: len(arena.entries_on("survivor")) >= before + count, "everything runs on the survivor")
    entries = arena.entries_on("survivor")[before:]
    for job in jobs:
        arena.repository.executions.stop(job, reason="measured")
    reading = arena.repository.reading
    _wait(lambda: not any(reading.execution(job).status.is_active for job in jobs), "everything has ended")
    return [entry - kill for kill, entry in zip(kills, sorted(entries), strict=True)]


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_S:g} s in vain: {what}")
        time.sleep(0.02)


@contextmanager
def _arena(timings: Timings) -> Iterator[Arena]:
    guard = Guard()
    with tempfile.TemporaryDirectory() as place, EmbeddedPostgres() as server:
        url = server.create_database("failover")
        arena = Arena(Path(place), url, timings, guard)
        try:
            migrations.upgrade(arena.repository.engine)
            yield arena
        finally:
            guard.close()
            arena.repository.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the failover time.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--profile", action="append", choices=sorted(PROFILES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = []
    for name in chosen.profile or sorted(PROFILES):
        timings = PROFILES[name]
        print(f"{name}:", file=sys.stderr)
        with _arena(timings) as arena:
            seconds = measure(arena, chosen.runs)
        results.append(
            {
                "profile": name,
                "heartbeat_s": timings.heartbeat_s,
                "remove_after_s": timings.remove_after_s,
                "runs": len(seconds),
                "median_s": round(statistics.median(seconds), 2),
                "max_s": round(max(seconds), 2),
                "all_s": [round(value, 2) for value in seconds],
            }
        )
    print("| profile | heartbeat | removed after | runs | median | maximum | target (threshold + 1.5 s) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in results:
        target = row["remove_after_s"] + 1.5
        print(
            f"| {row['profile']} | {row['heartbeat_s']:g} s | {row['remove_after_s']:g} s | {row['runs']} "
            f"| {row['median_s']:.1f} s | {row['max_s']:.1f} s | {target:g} s |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
