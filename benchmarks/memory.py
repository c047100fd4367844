"""Memory of a worker: its supervisor, and what each child adds, at rest and when it has worked.

python benchmarks/memory.py [--rounds 3] [--quick] [--size PARTITIONS]
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from fleet import Fleet, fleet
from launching_noops import launch_noops
from makespans import makespan_s
from options import Options, alone, say
from reporting import Machine, Report, Rounds, Target
from resident_memory import Memory, memory_of
from servers import Server, server

from airflow_dbpartition.demo.processes import SessionProcess

PARTITIONS = 1_000
QUICK_PARTITIONS = 20
SETTLED_AFTER_S = 8.0  # longer than an idle child keeps its connection
SUPERVISOR_MIB = 60.0
CHILD_MIB = 40.0
MOMENTS = AT_REST, WORKED = "at rest", "when it has worked"

# What is left when all of ours is taken away.
_BARE = """
import sys
from sqlalchemy import create_engine, text
with create_engine(sys.argv[1]).connect() as connection:
    connection.execute(text("SELECT 1"))
    print(flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Case:
    """How the worker is started."""

    executor: str
    concurrency: int

    @property
    def name(self) -> str:
        return f"--executor {self.executor} --concurrency {self.concurrency}"


@dataclass(frozen=True)
class Held:
    """What one worker holds."""

    supervisor: Memory
    children: list[Memory]

    @property
    def together(self) -> float:
        return sum(memory.proportional for memory in (self.supervisor, *self.children))


CASES = (Case("process", 1), Case("process", 4), Case("thread", 4))


def main(options: Options) -> list[Report]:
    """Start each worker once in each round, and look at it before and after its first job."""
    partitions = options.sized(PARTITIONS, quick=QUICK_PARTITIONS)
    found: dict[tuple[Case, str], list[Held]] = {(case, moment): [] for case in CASES for moment in MOMENTS}
    bare: list[Memory] = []
    with server() as running:
        machine = Machine.now(running.version)
        for number in range(1, options.rounds + 1):
            say(f"  round {number}")
            bare.append(_bare_python(running))
            for case in CASES:
                for moment, held in _look(running, case, partitions).items():
                    found[case, moment].append(held)
    return [_report(found, bare, machine, partitions)]


def _look(running: Server, case: Case, partitions: int) -> dict[str, Held]:
    url = running.fresh_database("memory")
    with fleet(url) as ours:
        (worker,) = ours.start(1, executor=case.executor, concurrency=case.concurrency)
        at_rest = _settled(worker, case)
        _work(ours, partitions)
        worked = _settled(worker, case)
    running.drop(url)
    return {AT_REST: at_rest, WORKED: worked}


def _work(ours: Fleet, partitions: int) -> None:
    makespan_s(ours.url, launch_noops(ours, "noops", partitions))


def _settled(worker: SessionProcess, case: Case) -> Held:
    time.sleep(SETTLED_AFTER_S)
    children = [pid for pid in worker.members() if pid != worker.pid]
    if len(children) != (case.concurrency if case.executor == "process" else 0):
        raise SystemExit(f"{case.name}: found {len(children)} children")
    return Held(memory_of(worker.pid), [memory_of(pid) for pid in children])


def _bare_python(running: Server) -> Memory:
    process = subprocess.Popen(
        [sys.executable, "-c", _BARE, running.embedded.url()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return memory_of(process.pid)
    finally:
        process.kill()
        process.communicate()


def _report(found: dict[tuple[Case, str], list[Held]], bare: list[Memory], machine: Machine, partitions: int) -> Report:
    report = Report(
        name="memory",
        title="Memory of a worker, MiB",
        columns=(
            "what",
            "moment",
            "supervisor, RSS",
            "supervisor, PSS",
            "a child, RSS",
            "a child, PSS",
            "a child, private",
            "all, PSS",
        ),
        machine=machine,
        notes=(
            "From /proc/<pid>/smaps_rollup. RSS counts whole what processes share (the interpreter, libraries), PSS by "
            "its part, private not at all. The targets are those of a supervisor's RSS, where all that is shared "
            "counts, and of what is private to a child, which is what it adds: together they are what a pod needs. PSS "
            "depends on what else runs on the machine. Of several children the largest is shown.",
            f"Looked at {SETTLED_AFTER_S:g} s after the start, and as long after {partitions:,} no-op partitions. The "
            "step's module imports nothing but the standard library and the worker's own.",
            "Python, SQLAlchemy and psycopg2: a process that has imported these and holds one connection.",
        ),
    )
    report.rows.append(
        {
            "what": "Python, SQLAlchemy and psycopg2",
            "supervisor, RSS": Rounds.of(memory.resident for memory in bare),
            "supervisor, PSS": Rounds.of(memory.proportional for memory in bare),
        }
    )
    for (case, moment), held in found.items():
        supervisor_rss = Rounds.of(one.supervisor.resident for one in held)
        report.rows.append(
            {
                "what": case.name,
                "moment": moment,
                "supervisor, RSS": supervisor_rss,
                "supervisor, PSS": Rounds.of(one.supervisor.proportional for one in held),
                "all, PSS": Rounds.of(one.together for one in held),
            }
        )
        report.targets.append(_limit(f"{case.name}, {moment}: supervisor, RSS", supervisor_rss, SUPERVISOR_MIB))
        if case.executor == "process":
            child_private = Rounds.of(max(child.private for child in one.children) for one in held)
            report.rows[-1] = {
                **report.rows[-1],
                "a child, RSS": Rounds.of(max(child.resident for child in one.children) for one in held),
                "a child, PSS": Rounds.of(max(child.proportional for child in one.children) for one in held),
                "a child, private": child_private,
            }
            report.targets.append(_limit(f"{case.name}, {moment}: a child, private", child_private, CHILD_MIB))
    return report


def _limit(what: str, measured: Rounds, limit: float) -> Target:
    return Target(what, measured.median, limit, f"{limit:g} MiB", at_least=False)


if __name__ == "__main__":
    alone(main, __doc__)
