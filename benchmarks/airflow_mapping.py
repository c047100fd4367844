"""Slices that do nothing, on a real Airflow: dynamic task mapping beside one PartitionedStepOperator and its sensor.

One PostgreSQL holds Airflow's tables and ours. The run's start and end are Airflow's own moments of them. Processor
time is that of all four processes of Airflow and all that they started, from before the run is triggered until it has
ended; what Airflow uses while nothing runs is part of it, and shown beside.

python benchmarks/airflow_mapping.py [--rounds 3] [--quick] [--size N]
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet import fleet
from options import Options, alone, say
from processor_time import processor_s
from reporting import Machine, Report, Rounds, Target
from servers import Server, rows, server

from airflow_dbpartition.demo.airflow_api import AirflowApi
from airflow_dbpartition.demo.airflow_processes import COMPONENTS, AirflowProcesses, connection_fields

DAGS = Path(__file__).resolve().parent / "airflow_dags"
WARM_UP = 5
SIZES = (200, 1000)
QUICK_SIZES = (20,)
TASKS_AT_ONCE = 8
WORKERS = 2
SLOTS = 2
WAYS = MAPPED, PARTITIONED = "mapped", "partitioned"
LOOK_S = 0.1
PATIENCE_S = 1800.0
IDLE_S = 10.0
RATE_FACTOR = 20
PROCESSOR_FACTOR = 0.1

_RUN = "SELECT state, extract(epoch FROM end_date - start_date)::float8 FROM dag_run WHERE dag_id = %s AND run_id = %s"


@dataclass(frozen=True)
class Run:
    """Seconds: how long one DAG run took, and the processor time that was used meanwhile."""

    elapsed: float
    airflow: float
    workers: float
    postgresql: float


class Stage:
    """A healthy Airflow, and workers beside it."""

    def __init__(self, running: Server, airflow: AirflowProcesses, metadata_url: str, workers: list[int]) -> None:
        assert running.embedded.pid is not None
        self._metadata_url = metadata_url
        self._roots = [airflow.pid(component) for component in COMPONENTS], workers, [running.embedded.pid]
        self._api = AirflowApi(airflow.base_url, timeout_s=120)

    def wait_for_dags(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            for way in WAYS:
                self._api.wait_for_dag(f"{way}_{size}", timeout_s=120)

    def run(self, way: str, size: int, number: int) -> Run:
        """One DAG run, from trigger to end."""
        dag_id, run_id = f"{way}_{size}", f"round_{number}"
        before = self._used()
        self._api.trigger(dag_id, run_id=run_id)
        elapsed = self._wait(dag_id, run_id)
        return Run(elapsed, *(now - then for now, then in zip(self._used(), before, strict=True)))

    def idle_cores(self) -> float:
        """What Airflow uses of a core while nothing runs."""
        before = self._used()
        time.sleep(IDLE_S)
        return (self._used()[0] - before[0]) / IDLE_S

    def _used(self) -> list[float]:
        return [processor_s(some) for some in self._roots]

    def _wait(self, dag_id: str, run_id: str) -> float:
        """Look at the table, not by the API: asking must cost Airflow nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ((state, elapsed),) = rows(self._metadata_url, _RUN, (dag_id, run_id))
            if state == "success":
                return float(elapsed)
            if state == "failed" or time.monotonic() > deadline:
                raise SystemExit(f"run {run_id} of {dag_id} is {state}")
            time.sleep(LOOK_S)


@contextmanager
def _stage(running: Server, sizes: tuple[int, ...]) -> Iterator[Stage]:
    url = running.fresh_database("jobs")
    metadata_url = running.fresh_database("airflow")
    environment = {
        "AIRFLOW_CONN_DBPARTITION_DEFAULT": json.dumps(connection_fields(url)),
        "BENCHMARK_SLICES": ",".join(map(str, sizes)),
        "BENCHMARK_TASKS_AT_ONCE": str(TASKS_AT_ONCE),
    }
    with (
        tempfile.TemporaryDirectory() as home,
        fleet(url) as workers,
        AirflowProcesses(
            home=Path(home),
            database_url=metadata_url,
            dags_folder=DAGS,
            environment=environment,
            parallelism=TASKS_AT_ONCE,
        ) as airflow,
    ):
        started = workers.start(WORKERS, executor="process", concurrency=SLOTS)
        stage = Stage(running, airflow, metadata_url, [worker.pid for worker in started])
        stage.wait_for_dags(sizes)
        yield stage


def main(options: Options) -> list[Report]:
    """Run both ways in turn, in every round and at every size."""
    sizes = (options.size,) if options.size else QUICK_SIZES if options.quick else SIZES
    runs: dict[tuple[int, str], list[Run]] = {(size, way): [] for size in sizes for way in WAYS}
    with server() as running:
        machine = Machine.now(running.version)
        with _stage(running, (WARM_UP, *sizes)) as stage:
            for way in WAYS:
                stage.run(way, WARM_UP, 0)
            idle_cores = stage.idle_cores()
            for number in range(1, options.rounds + 1):
                for (size, way), done in runs.items():
                    done.append(stage.run(way, size, number))
                    say(
                        f"  round {number}: {size} slices, {way}: {done[-1].elapsed:.1f} s, "
                        f"Airflow's processes {done[-1].airflow:.1f} s"
                    )
    return [_report(runs, machine, idle_cores)]


def _report(runs: dict[tuple[int, str], list[Run]], machine: Machine, idle_cores: float) -> Report:
    report = Report(
        name="airflow_mapping",
        title="Slices that do nothing, on a real Airflow",
        columns=(
            "slices",
            "way",
            "run, s",
            "slices/s",
            "Airflow's processor time, s",
            "workers', s",
            "PostgreSQL's, s",
        ),
        machine=machine,
        notes=(
            f"mapped: one `@task` that is expanded over a literal list; LocalExecutor, {TASKS_AT_ONCE} tasks at once.",
            f"partitioned: one PartitionedStepOperator, one deferrable PartitionCompletionSensor, {WORKERS} workers "
            f"with {SLOTS} child processes each.",
            "Both ways: scheduler, DAG processor, triggerer and API server (one worker); one PostgreSQL for its tables "
            f"and ours. While nothing runs, Airflow uses {100 * idle_cores:.0f} % of a core; the figures include that.",
        ),
    )
    for (size, way), done in runs.items():
        report.rows.append(
            {
                "slices": size,
                "way": way,
                "run, s": Rounds.of(run.elapsed for run in done),
                "slices/s": Rounds.of(size / run.elapsed for run in done),
                "Airflow's processor time, s": Rounds.of(run.airflow for run in done),
                "workers', s": Rounds.of(run.workers for run in done),
                "PostgreSQL's, s": Rounds.of(run.postgresql for run in done),
            }
        )
    largest = max(size for size, _ in runs)
    mapped, ours = runs[largest, MAPPED], runs[largest, PARTITIONED]
    report.targets += [
        Target(
            what=f"slices/s at {largest:,}",
            measured=Rounds.of(largest / run.elapsed for run in ours).median,
            limit=Rounds.of(largest / run.elapsed for run in mapped).median,
            against="dynamic task mapping",
            factor=RATE_FACTOR,
        ),
        Target(
            what=f"Airflow's processor time at {largest:,}, s",
            measured=Rounds.of(run.airflow for run in ours).median,
            limit=Rounds.of(run.airflow for run in mapped).median,
            against="dynamic task mapping",
            factor=PROCESSOR_FACTOR,
            at_least=False,
        ),
    ]
    return report


if __name__ == "__main__":
    alone(main, __doc__)
