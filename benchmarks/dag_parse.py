"""What our imports add to the parse of a DAG file, beside those of an operator that comes with Airflow.

Airflow reads each DAG file again and again (`[dag_processor] min_file_process_interval`, 30 s), each time in a process
that is forked for it. It imports modules of `airflow` before it forks, and none of other packages: ours are paid for
each time.

    python benchmarks/dag_parse.py [--rounds 5] [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from options import Options, alone, say
from reporting import Cell, Machine, Report, Rounds, Target

FEWEST = 5  # interpreters for each figure
LIMIT_MS = 100.0  # of a processor's time

AIRFLOW = """
from airflow.sdk import DAG, task
with DAG("empty", schedule=None):
    pass
"""

OURS = """
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.sensors import LiveNodesSensor, PartitionCompletionSensor
with DAG("ours", schedule=None):
    enough = LiveNodesSensor(task_id="enough", min_nodes=2)
    plan = PartitionedStepOperator(
        task_id="plan", step="check", partitioner=ColumnRangePartitioner(table="orders", column="id")
    )
    done = PartitionCompletionSensor(task_id="done", job_execution_id=plan.output, deferrable=True)
    @task.partitioned_step(step="greet")
    def people(grid_size):
        return {f"part{place}": {} for place in range(grid_size)}
    enough >> plan >> done >> people()
"""

SQL = """
from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
with DAG("sql", schedule=None):
    SQLExecuteQueryOperator(task_id="query", conn_id="warehouse", sql="SELECT 1")
"""

WAYS = {"ours: two sensors, an operator and a decorated function": OURS, "SQLExecuteQueryOperator": SQL}

# No figure may hide that Airflow had imported a thing before us: so what our own modules ask for is written down.
WATCH = """
import builtins, sys
asked, real = set(), builtins.__import__
def watching(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and (globals or {}).get("__name__", "").split(".")[0] == "airflow_dbpartition":
        asked.add(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = watching
"""

HEAVY = ("sqlalchemy", "alembic", "psycopg2", "pymysql", "airflow_dbpartition.repository")

NOTES = (
    f"Medians of fresh interpreters, at least {FEWEST} for each file, with .pyc files. The first row is the import of "
    "`airflow.sdk` and an empty DAG. The others are what a file adds to that, measured in the same interpreter: the "
    "first row varies by more than they are.",
    f"In one more interpreter nothing of ours asks for {', '.join(HEAVY)}, or the benchmark fails.",
)


def main(options: Options) -> list[Report]:
    """Parse each file in as many interpreters as there are rounds, 5 at least, by turns."""
    rounds = 1 if options.quick else max(FEWEST, options.rounds)
    machine = Machine.now()
    measured: dict[str, list[Mapping[str, float]]] = {way: [] for way in WAYS}
    _refuse_heavy()
    for way, file in WAYS.items():
        _parsed(file)  # writes the .pyc files
        for number in range(1, rounds + 1):
            measured[way].append(_parsed(file))
            say(f"  {way}, round {number}: {measured[way][-1]['added_ms']:.1f} ms")

    def rounds_of(found: list[Mapping[str, float]], what: str) -> Rounds:
        return Rounds.of(one[what] for one in found)

    def row(way: str, found: list[Mapping[str, float]], what: str) -> Mapping[str, Cell]:
        return {
            "file": way,
            "ms": rounds_of(found, f"{what}_ms"),
            "processor's ms": rounds_of(found, f"{what}_cpu_ms"),
            "modules": int(rounds_of(found, f"{what}_modules").median),
        }

    first = next(iter(WAYS))
    return [
        Report(
            name="dag_parse",
            title="DAG parse: what the imports add",
            columns=("file", "ms", "processor's ms", "modules"),
            machine=machine,
            rows=[
                row("airflow.sdk and an empty DAG", [one for found in measured.values() for one in found], "airflow"),
                *(row(f"+ {way}", found, "added") for way, found in measured.items()),
            ],
            targets=[
                Target(
                    "processor's ms of ours",
                    rounds_of(measured[first], "added_cpu_ms").median,
                    LIMIT_MS,
                    f"{LIMIT_MS:g} ms",
                    at_least=False,
                )
            ],
            notes=NOTES,
        )
    ]


def _parsed(file: str) -> Mapping[str, float]:
    """Milliseconds of clock and processor, and modules: of Airflow, and what the file adds."""
    program = f"""
import sys, time
def now():
    return time.perf_counter(), time.process_time(), len(sys.modules)
began = now()
{AIRFLOW}
between = now()
{file}
ended = now()
import json
def spent(what, since, until):
    clock, processor, modules = (new - old for new, old in zip(until, since))
    return {{f"{{what}}_ms": clock * 1000, f"{{what}}_cpu_ms": processor * 1000, f"{{what}}_modules": modules}}
print(json.dumps({{**spent("airflow", began, between), **spent("added", between, ended)}}))
"""
    found: dict[str, float] = json.loads(_run(program))
    return found


def _refuse_heavy() -> None:
    """End the benchmark if reading a DAG makes one of our modules ask for the database's side, or load it."""
    program = f"""
{WATCH}
{AIRFLOW}
before = set(sys.modules)
{OURS}
import json
print(json.dumps(sorted(asked | (set(sys.modules) - before))))
"""
    brought: list[str] = json.loads(_run(program))
    if not any(name == "airflow_dbpartition.operators" for name in brought):
        raise SystemExit("the imports were not seen")
    heavy = [name for name in brought if name in HEAVY or name.startswith(tuple(f"{one}." for one in HEAVY))]
    if heavy:
        raise SystemExit(f"reading a DAG imports {', '.join(heavy)}")


def _run(program: str) -> str:
    """The last line that a fresh interpreter prints, with an Airflow home of its own."""
    with tempfile.TemporaryDirectory(prefix="dbpartition-parse-") as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        environment = {**kept, "AIRFLOW_HOME": home, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=home, check=True, stdout=subprocess.PIPE, text=True
        )
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    alone(main, __doc__)
