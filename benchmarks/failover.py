"""From the end of a worker to its partition running again: median and maximum, beside the target.

Each run has a worker of its own that is ended in the middle of its one partition, and shares one survivor. Measured
from the signal to the moment at which the step is entered again, by the one clock of this machine. Several victims are
ended in one go, apart from each other by a random part of a heartbeat, so that the phase of the heartbeat is not always
the same. The ends:

* kill: SIGKILL of the supervisor alone, whose child must die with it. Found by silence: target `remove_after` + 1.5 s.
* terminate: SIGTERM with `--grace 0`. The worker gives its work away itself: target 1 s.
* error: an error that the supervisor does not handle (raised by a signal handler that is only here). Target 1 s.
* child: SIGKILL of the child; its worker runs the partition again, as its next attempt. Target 1 s.

    python benchmarks/failover.py [--runs 20] [--profile default] [--profile fast] [--end kill] [--json FILE]
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
from typing import Any, NamedTuple

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard, SessionProcess, log_tail, send_signal
from airflow_dbpartition.domain import JobIdentity, JobSettings, Partition, TransferPolicy
from airflow_dbpartition.repository import JobRepository, NewExecution

HERE = Path(__file__).resolve().parent
PROFILES = {
    "default": Timings(),
    "fast": Timings(heartbeat_s=0.5, unreachable_after_s=2.0, remove_after_s=4.0),
}
ENDS = ("kill", "terminate", "error", "child")
CLEAN_TARGET_S = 1.0
AT_ONCE = 5
PATIENCE_S = 90.0


class Entry(NamedTuple):
    """One entry into the step."""

    node_id: str
    moment: float


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
            "--grace": 0,
        }
        process = SessionProcess(
            [
                sys.executable,
                str(HERE / "breakable_worker.py"),
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
                settings=JobSettings(
                    transferable=TransferPolicy.ALWAYS.value, stealing=False, partition_retries=1, retry_delay_s=0.01
                ),
            ),
            [Partition("p", {"trace": str(self.trace), "job": job})],
            {"p": node_id},
        )
        return launched.job_execution_id

    def entries_of(self, job: str) -> list[Entry]:
        """When and where the step was entered for the job, in order."""
        rows = [line.split() for line in self.trace.read_text().splitlines()]
        return [Entry(node_id, float(moment)) for name, node_id, moment in rows if name == job]


def end(victim: SessionProcess, how: str) -> None:
    if how == "child":
        (child,) = [pid for pid in victim.members() if pid != victim.pid]
        send_signal(child, signal.SIGKILL)
    else:
        victim.send({"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "error": signal.SIGUSR1}[how])


def measure(arena: Arena, runs: int, how: str) -> list[float]:
    """End so many victims, some at a time, and return the seconds that each took."""
    survivor = arena.start("survivor", concurrency=AT_ONCE)
    measured: list[float] = []
    while len(measured) < runs:
        measured += _one_go(arena, how, first=len(measured), count=min(AT_ONCE, runs - len(measured)))
        print(f"  {len(measured)}/{runs}", file=sys.stderr, flush=True)
    survivor.send(signal.SIGTERM)
    survivor.wait(timeout_s=10)
    return measured


def _one_go(arena: Arena, how: str, *, first: int, count: int) -> list[float]:
    names = [f"victim{first + number}" for number in range(count)]
    victims = {name: arena.start(name, concurrency=1) for name in names}
    jobs = [arena.submit(job_of(name), name) for name in names]
    _wait(
        lambda: all(arena.entries_of(job_of(name)) for name in names), "every victim is in the middle of its partition"
    )
    ended = {}
    for name in names:
        time.sleep(random.uniform(0, arena.timings.heartbeat_s))
        ended[name] = time.time()
        end(victims[name], how)
    _wait(lambda: all(len(arena.entries_of(job_of(name))) > 1 for name in names), "everything runs again")
    again = {name: arena.entries_of(job_of(name))[1] for name in names}
    for name in names:
        assert again[name].node_id.startswith(f"{name}-" if how == "child" else "survivor-"), again
    for job in jobs:
        arena.repository.executions.stop(job, reason="measured")
    reading = arena.repository.reading
    _wait(lambda: not any(reading.execution(job).status.is_active for job in jobs), "everything has ended")
    for victim in victims.values():
        victim.kill()
    return [again[name].moment - ended[name] for name in names]


def job_of(name: str) -> str:
    return f"job-of-{name}"


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
    parser.add_argument("--end", action="append", choices=ENDS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = []
    for name in chosen.profile or sorted(PROFILES):
        timings = PROFILES[name]
        for how in chosen.end or ENDS:
            print(f"{name}, {how}:", file=sys.stderr)
            with _arena(timings) as arena:
                seconds = measure(arena, chosen.runs, how)
            results.append(
                {
                    "profile": name,
                    "heartbeat_s": timings.heartbeat_s,
                    "remove_after_s": timings.remove_after_s,
                    "end": how,
                    "runs": len(seconds),
                    "median_s": round(statistics.median(seconds), 2),
                    "max_s": round(max(seconds), 2),
                    "target_s": timings.remove_after_s + 1.5 if how == "kill" else CLEAN_TARGET_S,
                    "all_s": [round(value, 2) for value in seconds],
                }
            )
    print("| profile | heartbeat | removed after | end | runs | median | maximum | target |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in results:
        print(
            f"| {row['profile']} | {row['heartbeat_s']:g} s | {row['remove_after_s']:g} s | {row['end']} "
            f"| {row['runs']} | {row['median_s']:.2f} s | {row['max_s']:.2f} s | {row['target_s']:g} s |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
