"""Speed-up of a step that computes: one process, two processes, two workers; and what we add to the user's code.

python benchmarks/speed_up.py [--rounds 3] [--quick] [--size PARTITIONS]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import bare_processes
import steps_of_speed_up
from fleet import fleet
from makespans import makespan_s
from options import Options, alone, say
from processor_time import processor_s
from reporting import Cell, Machine, Report, Rounds, Target
from servers import Server, rows, server

from airflow_dbpartition.demo.flights import FLIGHT_COUNT, load_flights
from airflow_dbpartition.domain import JobIdentity
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.partitioners.ranges import cut_evenly

PARTITIONS = 240
QUICK_PARTITIONS = 20
QUICK_FLIGHTS = 20_000
LEAST_EFFICIENCY = 0.9
READY_AFTER_S = 2.0  # a worker registers when the first of its children is ready
_IN_USER_CODE = """
SELECT sum((result ->> 'seconds')::float8), sum((result ->> 'processor_s')::float8)
FROM batch_partitions WHERE job_execution_id = %s
"""


@dataclass(frozen=True)
class Run:
    """Seconds of one run.

    Attributes:
        elapsed: makespan.
        in_user_code: of all partitions together, by the clock; None = not measured.
        computing: what of that a processor ran.
        ours, postgresql: processor time beside the user's code.
    """

    elapsed: float
    in_user_code: float | None = None
    computing: float | None = None
    ours: float | None = None
    postgresql: float | None = None

    def part_computing(self, processes: int) -> float:
        """The part of the time of all processes in which a processor ran user code."""
        return (self.computing or 0.0) / (processes * self.elapsed)


@dataclass(frozen=True)
class Arena:
    """A database with flights, and the number of ranges that they are cut into."""

    running: Server
    url: str
    flights: int
    partitions: int


class Way(Protocol):
    """Something that computes all ranges."""

    @property
    def name(self) -> str: ...
    @property
    def processes(self) -> int:
        """In which user code runs at once."""

    @property
    def alone(self) -> Way:
        """The same with one process."""

    def run(self, arena: Arena, number: int) -> Run: ...


@dataclass(frozen=True)
class Bare:
    """No database in between, no record of anything: what the machine can do."""

    processes: int

    @property
    def name(self) -> str:
        return "bare pool of processes"

    @property
    def alone(self) -> Bare:
        return Bare(1)

    def run(self, arena: Arena, number: int) -> Run:  # noqa: ARG002
        ranges = [(part.low, part.high) for part in cut_evenly(1, arena.flights, arena.partitions)]
        return Run(bare_processes.seconds(arena.url, ranges, self.processes))


@dataclass(frozen=True)
class Ours:
    """Real workers."""

    workers: int
    concurrency: int
    prefetch: int = 0

    @property
    def name(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}, --concurrency {self.concurrency}"
        return f"{workers} --prefetch {self.prefetch}" if self.prefetch else workers

    @property
    def processes(self) -> int:
        return self.workers * self.concurrency

    @property
    def alone(self) -> Ours:
        return Ours(1, 1, self.prefetch)

    def run(self, arena: Arena, number: int) -> Run:
        with fleet(arena.url) as ours:
            started = ours.start(
                self.workers,
                executor="process",
                concurrency=self.concurrency,
                options={"--import": steps_of_speed_up.__file__, "--prefetch": self.prefetch},
            )
            time.sleep(READY_AFTER_S)
            assert arena.running.embedded.pid is not None
            roots = [worker.pid for worker in started], [arena.running.embedded.pid]
            before = [processor_s(some) for some in roots]
            job = Job(
                identity=JobIdentity(self.name, {"round": number}),
                step_name="delay_interval",
                partitioner=ColumnRangePartitioner(table="flights", column="id"),
                partitions_per_node=arena.partitions // self.workers,
            )
            job_execution_id = Launcher(ours.repository).launch(job).job_execution_id
            elapsed = makespan_s(arena.url, job_execution_id)
            workers, postgresql = (processor_s(some) - so_far for some, so_far in zip(roots, before, strict=True))
            ((in_user_code, computing),) = rows(arena.url, _IN_USER_CODE, (job_execution_id,))
        return Run(elapsed, in_user_code, computing, workers - computing, postgresql)


WAYS: Sequence[Way] = (
    Bare(1),
    Bare(2),
    *(Ours(workers, concurrency, prefetch) for prefetch in (0, 1) for workers, concurrency in ((1, 1), (1, 2), (2, 1))),
)


def main(options: Options) -> list[Report]:
    """Let each way compute everything once in each round."""
    partitions = options.sized(PARTITIONS, quick=QUICK_PARTITIONS)
    runs: dict[Way, list[Run]] = {way: [] for way in WAYS}
    with server() as running:
        machine = Machine.now(running.version)
        url = running.fresh_database("flights")
        flights = load_flights(url, limit=QUICK_FLIGHTS if options.quick else None)
        rows(url, "VACUUM ANALYZE flights")
        for number in range(1, options.rounds + 1):
            for way, done in runs.items():
                running.checkpoint()
                done.append(way.run(Arena(running, url, flights, partitions), number))
                say(f"  round {number}: {way.name}, {way.processes} at once: {done[-1].elapsed:.2f} s")
    return [_report(runs, machine, partitions, flights)]


def _report(runs: dict[Way, list[Run]], machine: Machine, partitions: int, flights: int) -> Report:
    report = Report(
        name="speed_up",
        title=f"Speed-up: {partitions} partitions that compute",
        columns=(
            "what",
            "processes",
            "s",
            "efficiency",
            "efficiency at equal speed",
            "× bare",
            "overhead, %",
            "processor time of user code, s",
            "ours, s",
            "PostgreSQL's, s",
        ),
        machine=machine,
        decimals=3,
        notes=(
            f"The step reads its range of {flights:,} flights (all that left New York in 2013 are {FLIGHT_COUNT:,}) "
            f"and draws {steps_of_speed_up.RESAMPLES} samples of their delays, in plain Python.",
            "Efficiency: the time of one process, divided by the processes and their time, in the same round. "
            "Overhead: the part of the processes' time that was not spent in user code, from the writing of the plan "
            "to the end of the last partition. Where cores are fewer than what runs, user code also waits for them; "
            "that is in its own time.",
            "At equal speed: the part of the processes' time in which a processor ran user code, divided by that part "
            "with one process. The speed of a virtual machine drifts from run to run (see the processor time that the "
            "same user code takes); this figure does not.",
            "PostgreSQL and the supervisors run on the same cores. Their processor time is what was used beside the "
            "user's code; the supervisors' includes what our code uses in the children.",
            "The bare pool is multiprocessing's, on the same ranges. It writes nothing, and shows what these cores "
            "can do.",
            "With --prefetch 1 a worker claims one partition ahead: its children wait neither for the settle nor for "
            "the next claim, but what is claimed ahead cannot be stolen.",
        ),
    )
    for way, done in runs.items():
        efficiency = Rounds.of(
            single.elapsed / (way.processes * run.elapsed) for single, run in zip(runs[way.alone], done, strict=True)
        )
        row: dict[str, Cell] = {
            "what": way.name,
            "processes": way.processes,
            "s": Rounds.of(run.elapsed for run in done),
            "efficiency": efficiency,
        }
        if isinstance(way, Ours):
            at_equal_speed = Rounds.of(
                run.part_computing(way.processes) / single.part_computing(1)
                for single, run in zip(runs[way.alone], done, strict=True)
            )
            row["efficiency at equal speed"] = at_equal_speed
            bare = runs[Bare(way.processes)]
            row["× bare"] = Rounds.of(run.elapsed / other.elapsed for run, other in zip(done, bare, strict=True))
            row["overhead, %"] = _known(
                100 * (1 - run.in_user_code / (way.processes * run.elapsed)) if run.in_user_code is not None else None
                for run in done
            )
            row["processor time of user code, s"] = _known(run.computing for run in done)
            row["ours, s"] = _known(run.ours for run in done)
            row["PostgreSQL's, s"] = _known(run.postgresql for run in done)
            if way.processes > 1 and not way.prefetch:
                report.targets += [
                    Target(f"{way.name}: {what}", measured.median, LEAST_EFFICIENCY, f"{LEAST_EFFICIENCY:g}")
                    for what, measured in (("efficiency", efficiency), ("at equal speed", at_equal_speed))
                ]
        report.rows.append(row)
    return report


def _known(values: Iterable[float | None]) -> Rounds:
    return Rounds.of(value for value in values if value is not None)


if __name__ == "__main__":
    alone(main, __doc__)
