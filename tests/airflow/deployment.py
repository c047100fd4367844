"""One real deployment for the stories: PostgreSQL, Airflow's four processes, two workers; and a run as tests see it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Table, select

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.demo.airflow_api import AirflowApi, AirflowApiError
from airflow_dbpartition.demo.airflow_processes import AirflowProcesses, connection_fields
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port, log_tail, process_table
from airflow_dbpartition.demo.stage import FAST
from airflow_dbpartition.domain import JobExecution
from airflow_dbpartition.repository import JobRepository
from tests.airflow import steps_of_stories

HERE = Path(__file__).resolve().parent
SCHEMA = "jobs"
PASSWORD = "hunter2/@x"
WORKERS = ("left", "right")
PATIENCE_S = 180.0  # for one thing in a story; the machine is busy with all the others
ENDED = frozenset({"success", "failed", "skipped", "upstream_failed"})

T = TypeVar("T")


def wait_until(look: Callable[[], T | None], what: str, *, timeout_s: float = PATIENCE_S, every_s: float = 0.3) -> T:
    """Return the first answer that is neither None nor False."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(every_s)


class Deployment:
    """Everything runs as long as the context lasts, and nothing of it survives.

    Args:
        directory: where data and logs go.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gates = directory / "gates"
        self._stack = contextlib.ExitStack()
        self._shared: dict[str, Run] = {}
        self._lock = threading.Lock()

    # --- setting up --------------------------------------------------------------------------------------------

    def __enter__(self) -> Deployment:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        self.gates.mkdir()
        self.postgres = self._stack.enter_context(EmbeddedPostgres(settings={"fsync": "off"}))
        self.url = self.postgres.create_database("warehouse")
        self.airflow = AirflowProcesses(
            home=self.directory / "airflow",
            database_url=self.postgres.create_database("airflow"),
            dags_folder=HERE / "dag_files",
            environment={**self._connections(), **_QUICK, steps_of_stories.GATES_VARIABLE: str(self.gates)},
            parallelism=8,
        )
        self._stack.callback(self.airflow.stop)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(self._start_airflow)
            self.repository = JobRepository.connect(DatabaseConfig(url=self.url, schema=SCHEMA, pool_size=5))
            self._stack.callback(self.repository.close)
            migrations.upgrade(self.repository.engine, SCHEMA)
            steps_of_stories.metadata.create_all(self.repository.engine)
            self._start_workers()
            starting.result()
        api = AirflowApi(self.airflow.base_url, poll_interval_s=0.7, timeout_s=PATIENCE_S)
        self.api = self._stack.enter_context(api)
        for dag_id in ONE_OF_EACH_FILE:
            self.api.wait_for_dag(dag_id, timeout_s=PATIENCE_S)
        assert self.api.import_errors() == []
        # The first task makes the API server load what all need; eight that wait for it at once would fail.
        assert self.run("plain_planning", "first_of_all", {"one": {}}).ends() == "success"

    def _start_airflow(self) -> None:
        self.airflow.migrate()
        self.airflow.start()
        self.airflow.wait_until_healthy()

    def _connections(self) -> dict[str, str]:
        good = {
            **connection_fields(self.url),
            "extra": {
                "dbpartition_schema": SCHEMA,
                "heartbeat_s": FAST.heartbeat_s,
                "unreachable_after_s": FAST.unreachable_after_s,
                "remove_after_s": FAST.remove_after_s,
            },
        }
        connections = {
            "dbpartition_default": good,
            "nobody_there": {**good, "port": free_port(), "password": PASSWORD},
            "never_migrated": {**good, "extra": {"dbpartition_schema": "nothing_here"}},
        }
        return {f"AIRFLOW_CONN_{name.upper()}": json.dumps(fields) for name, fields in connections.items()}

    def _start_workers(self) -> None:
        guard = Guard()
        self._stack.callback(guard.close)
        workers = [self._start_worker(name, guard) for name in WORKERS]

        def live() -> bool:
            for worker in workers:
                assert worker.exit_code is None, f"a worker ended:\n{log_tail(worker.log_path)}"
            nodes = self.repository.nodes.live(node_group="default", within_s=FAST.unreachable_after_s)
            return len(nodes) == len(WORKERS)

        wait_until(live, "the workers are live nodes", every_s=0.1)

    def _start_worker(self, name: str, guard: Guard) -> SessionProcess:
        options = {
            "--import": HERE / "steps_of_stories.py",
            "--node-prefix": name,
            "--executor": "thread",  # most partitions of the stories do nothing but wait
            "--concurrency": 24,
            "--heartbeat": FAST.heartbeat_s,
            "--unreachable-after": FAST.unreachable_after_s,
            "--remove-after": FAST.remove_after_s,
            "--sweep": FAST.sweep_s,
            "--poll": FAST.poll_s,
            "--steal-after": FAST.steal_after_s,
        }
        words = [str(word) for pair in options.items() for word in pair]
        environment = {
            **os.environ,
            "DBPARTITION_DATABASE_URL": self.url,
            "DBPARTITION_SCHEMA": SCHEMA,
            steps_of_stories.GATES_VARIABLE: str(self.gates),
        }
        worker = SessionProcess(
            [sys.executable, "-m", "airflow_dbpartition.cli", "worker", *words],
            log_path=self.directory / f"{name}.log",
            environment=environment,
            cwd=HERE.parent.parent,
        )
        guard.add(worker)
        self._stack.callback(worker.kill)
        return worker

    # --- runs --------------------------------------------------------------------------------------------------

    def run(self, dag_id: str, run_id: str, partitions: object = (), **conf: Any) -> Run:
        """Start a run; its DAG may use what is in `conf`. Partitions with `"gate": True` wait for `Run.open`."""
        if isinstance(partitions, Mapping):
            partitions = {
                key: {**context, "gate": run_id} if context.get("gate") is True else context
                for key, context in partitions.items()
            }
        self.api.trigger(dag_id, {"partitions": partitions, **conf}, run_id=run_id)
        return Run(self, dag_id, run_id)

    def shared_run(self, dag_id: str) -> Run:
        """The one run of a DAG that several stories look at."""
        with self._lock:
            if dag_id not in self._shared:
                self._shared[dag_id] = self.run(dag_id, f"shared_{dag_id}")
            return self._shared[dag_id]

    def write_slices(self, run_id: str, slices: Sequence[Mapping[str, Any]]) -> None:
        """What the mapped tasks of a run are to expand over, each slice being the partitions of one task."""
        (self.gates / f"{run_id}.slices").write_text(json.dumps(slices))

    def write_chosen(self, run_id: str, map_indexes: Sequence[int]) -> None:
        """The executions of which of the mapped operators of a run are to be waited for."""
        (self.gates / f"{run_id}.chosen").write_text(json.dumps(map_indexes))

    def rows(self, table: Table) -> list[tuple[int, str]]:
        """(job instance, partition key) of every row that the steps have written."""
        query = select(table.c.job_instance_id, table.c.partition_key)
        with self.repository.engine.connect() as connection:
            return [(row[0], row[1]) for row in connection.execute(query)]


class Run:
    """One DAG run, and what it has led to in the job repository."""

    def __init__(self, deployment: Deployment, dag_id: str, run_id: str) -> None:
        self._deployment = deployment
        self._api = deployment.api
        self.dag_id = dag_id
        self.run_id = run_id

    # --- Airflow -----------------------------------------------------------------------------------------------

    def ends(self) -> str:
        """Wait for the end of the run, and return its state."""
        return str(self._api.wait_for_run(self.dag_id, self.run_id, timeout_s=PATIENCE_S)["state"])

    def task(self, task_id: str) -> dict[str, Any]:
        return self._api.task_instance(self.dag_id, self.run_id, task_id)

    def state(self, task_id: str) -> str | None:
        state = self.task(task_id)["state"]
        return None if state is None else str(state)

    def wait_for(self, task_id: str, *states: str, try_number: int | None = None) -> None:
        """Wait until the task is in one of these states, in the given try."""

        def is_there() -> bool:
            task = self.task(task_id)
            if task["state"] in states and try_number in (None, task["try_number"]):
                return True
            assert task["state"] not in ENDED - set(states) or try_number not in (None, task["try_number"]), (
                f"{task_id} of {self.run_id} is {task['state']}, expected {states}:\n{self.log(task_id)}"
            )
            return False

        wait_until(is_there, f"{task_id} of {self.run_id} is {states}", every_s=0.7)

    def mapped_states(self, task_id: str) -> dict[int, str | None]:
        """The state of each task of a mapping by its index."""
        tasks = self._api.task_instances(self.dag_id, self.run_id)
        return {task["map_index"]: task["state"] for task in tasks if task["task_id"] == task_id}

    def mark(self, task_id: str, state: str) -> None:
        self._api.set_state(self.dag_id, self.run_id, task_id, state)

    def mark_failed(self, task_id: str) -> None:
        self.mark(task_id, "failed")

    def mark_run(self, state: str) -> None:
        self._api.set_run_state(self.dag_id, self.run_id, state)

    def clear(self, task_id: str, *, include_downstream: bool = False) -> None:
        self._api.clear(self.dag_id, self.run_id, [task_id], include_downstream=include_downstream)

    def xcom(self, task_id: str, **options: Any) -> Any:
        return self._api.xcom(self.dag_id, self.run_id, task_id, **options)

    def links(self, task_id: str) -> dict[str, str | None]:
        return self._api.links(self.dag_id, self.run_id, task_id)

    def log(self, task_id: str, *, try_number: int | None = None, map_index: int = -1) -> str:
        """The log of one try, the latest where none is named."""
        number = try_number or (self.task(task_id)["try_number"] if map_index < 0 else 1) or 1
        return self._api.task_log(self.dag_id, self.run_id, task_id, try_number=number, map_index=map_index)

    def errors(self, task_id: str) -> list[str]:
        """What the latest try has raised, with the causes that its log shows, each as `Type: text`."""
        found: list[str] = []
        for line in self.log(task_id).splitlines():
            _, _, details = line.partition(" error_detail=")
            if details:
                found += [f"{error['exc_type']}: {error['exc_value']}" for error in ast.literal_eval(details)]
        return found

    def wait_for_log(self, task_id: str, words: str, *, try_number: int | None = None, map_index: int = -1) -> None:
        """Wait until the task has said something: it is then as far as that."""

        def is_said() -> bool:
            try:
                return words in self.log(task_id, try_number=try_number, map_index=map_index)
            except AirflowApiError as error:
                if error.status != 404:
                    raise
                return False  # not begun, or not expanded yet

        wait_until(is_said, f"{task_id} of {self.run_id} logs {words!r}", every_s=0.7)

    def wait_for_trigger(self, task_id: str, *, try_number: int = 1, map_index: int = -1) -> None:
        """Wait until the task is deferred and its trigger runs: Airflow calls the `on_kill` of no other.

        And until the scheduler has heard that the task's process has gone: Airflow fails a task that comes back
        before, which takes a scheduler that is as busy as this one.
        """
        if map_index < 0:
            self.wait_for(task_id, "deferred", try_number=try_number)
        starts = f"trigger {self.dag_id}/{self.run_id}/{task_id}"
        self.wait_for_log(task_id, starts, try_number=try_number, map_index=map_index)
        heard = (
            "Received executor event with state success for task instance TaskInstanceKey("
            f"dag_id='{self.dag_id}', task_id='{task_id}', run_id='{self.run_id}', try_number={try_number}, "
            f"map_index={map_index}"
        )
        path = self._deployment.airflow.log_path("scheduler")
        wait_until(lambda: heard in path.read_text(errors="replace"), f"the scheduler has heard of {task_id}")

    def process_of(self, task_id: str) -> int:
        """The process that runs the task's code (not Airflow's own that watches it)."""
        title = f"airflow worker -- {self.task(task_id)['id']}"

        def find() -> int | None:
            for row in process_table():
                with contextlib.suppress(OSError):
                    if title in Path("/proc", str(row.pid), "cmdline").read_text():
                        return row.pid
            return None

        return wait_until(find, f"the process of {task_id} of {self.run_id}", every_s=0.1)

    # --- the job repository ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Let the partitions that wait go on."""
        (self._deployment.gates / self.run_id).touch()

    def let_plan(self) -> None:
        """Let the partitioners that are held go on."""
        (self._deployment.gates / f"{self.run_id}.plan").touch()

    def marks(self, what: str) -> int:
        """How many processes of this run have come to a place where they are held: "planning", "lingering"."""
        return len(list(self._deployment.gates.glob(f"{self.run_id}.{what}.*")))

    def executions(self) -> list[JobExecution]:
        """The job executions that this run has launched, oldest first."""
        recent = self._deployment.repository.reading.recent(limit=1000)
        return sorted(
            (execution for execution in recent if execution.manager.get("run_id") == self.run_id),
            key=lambda execution: execution.job_execution_id,
        )

    def execution(self) -> JobExecution:
        """The only job execution of this run."""
        (execution,) = self.executions()
        return execution

    def wait_for_claims(self, count: int = 1) -> None:
        """Wait until workers have begun so many partitions of the latest execution."""

        def begun() -> bool:
            executions = self.executions()
            return bool(executions) and self.counts(executions[-1]).get("CLAIMED", 0) >= count

        wait_until(begun, f"{count} partitions of {self.run_id} run", every_s=0.2)

    def wait_for_status(self, status: str) -> JobExecution:
        """Wait until the latest execution has a status."""

        def find() -> JobExecution | None:
            executions = self.executions()
            return executions[-1] if executions and executions[-1].status.value == status else None

        return wait_until(find, f"the execution of {self.run_id} is {status}", every_s=0.2)

    def wait_for_status_of(self, execution: JobExecution, status: str) -> None:
        """Wait until one of several executions has a status."""
        reading = self._deployment.repository.reading

        def has_it() -> bool:
            return reading.execution(execution.job_execution_id).status.value == status

        wait_until(has_it, f"execution {execution.job_execution_id} of {self.run_id} is {status}")

    def active(self) -> list[JobExecution]:
        """The executions of this run that have not ended."""
        return [execution for execution in self.executions() if execution.status.is_active]

    def keys(self, execution: JobExecution) -> list[str]:
        """The keys of an execution's partitions."""
        rows = self._deployment.repository.reading.partitions(execution.job_execution_id)
        return [row.partition_key for row in rows]

    def counts(self, execution: JobExecution) -> dict[str, int]:
        """How many partitions of an execution are in which status."""
        rows = self._deployment.repository.reading.partitions(execution.job_execution_id)
        return dict(Counter(row.status.value for row in rows))

    def begun(self) -> Counter[str]:
        """How often each partition was begun, over all executions of this run."""
        return self._count(steps_of_stories.begun)

    def done(self) -> Counter[str]:
        """How often each partition has done its work."""
        return self._count(steps_of_stories.done)

    def _count(self, table: Table) -> Counter[str]:
        instances = {execution.job_instance_id for execution in self.executions()}
        return Counter(key for instance, key in self._deployment.rows(table) if instance in instances)


def assert_nothing_was_done_twice(deployment: Deployment) -> None:
    """And nothing has succeeded over a failure: looks at everything that the tests have left in the database."""
    assert [key for key, times in Counter(deployment.rows(steps_of_stories.done)).items() if times > 1] == []
    reading = deployment.repository.reading
    for execution in reading.recent(limit=1000):
        ended = {str(row.status) for row in reading.partitions(execution.job_execution_id)}
        if execution.status.value == "COMPLETED":
            assert ended <= {"COMPLETED"}, execution
    active = Counter(execution.job_instance_id for execution in reading.recent(limit=1000, active=True))
    assert all(count == 1 for count in active.values())


def summary_without_moment(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without what differs from run to run."""
    return {name: value for name, value in summary.items() if name not in ("duration_s", "nodes")}


def gated(count: int, **context: Any) -> dict[str, dict[str, Any]]:
    """So many partitions that wait for `Run.open`."""
    return {f"p{number}": {"gate": True, **context} for number in range(count)}


# Airflow looks more often than a big installation would let it, and parses no file twice.
_QUICK = {
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "600",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "2",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "15",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
}

# All the DAGs of a file appear at once.
ONE_OF_EACH_FILE: Iterable[str] = ("mapped", "plain_blocking")
