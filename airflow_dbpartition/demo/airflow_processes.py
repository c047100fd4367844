"""A real Airflow for the demo and the end-to-end tests: its four processes, started, watched and stopped."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import httpx

from airflow_dbpartition.demo.processes import (
    DemoError,
    Guard,
    SessionProcess,
    family,
    free_port,
    log_tail,
    pids_with_environment,
    send_signal,
)

Component = Literal["api-server", "scheduler", "dag-processor", "triggerer"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
HEALTH_POLL_S = 0.25

# What the health report calls each component, and where it says when it was last heard.
HEALTH_KEYS: dict[Component, tuple[str, str]] = {
    "scheduler": ("scheduler", "latest_scheduler_heartbeat"),
    "dag-processor": ("dag_processor", "latest_dag_processor_heartbeat"),
    "triggerer": ("triggerer", "latest_triggerer_heartbeat"),
}
COMMANDS: dict[Component, list[str]] = {
    "api-server": ["api-server"],
    # Logs are read from the shared directory; the log servers' fixed ports would collide with another Airflow.
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}


def connection_fields(url: str) -> dict[str, Any]:
    """What Airflow stores of a connection to a PostgreSQL on this machine that trusts everybody."""
    address = urlsplit(url)
    return {
        "conn_type": "postgres",
        "host": address.hostname,
        "port": address.port,
        "login": address.username,
        "schema": address.path.lstrip("/"),
    }


class AirflowProcesses:
    """API server, scheduler, DAG processor and triggerer of one Airflow, as long as the context lasts.

    Everybody who can reach 127.0.0.1 is its administrator. Entering the context migrates the database, starts the four
    and waits until all are healthy; leaving it ends them and everything they started.

    Args:
        home: AIRFLOW_HOME; made when missing. Logs of the processes go to `home/processes`.
        database_url: the metadata database, which must exist.
        dags_folder: where the DAG files are.
        environment: further variables for the processes, such as AIRFLOW_CONN_…; they win over ours.
        python: the Python that has Airflow installed.
        parallelism: how many tasks the LocalExecutor runs at once (it keeps a process for each).
        start_timeout_s: seconds for the database's migration, and again until all are healthy.
        stop_timeout_s: seconds between SIGTERM and SIGKILL when all are stopped.

    Raises:
        DemoError: a process died or was not healthy in time; the text ends with its log's tail.
    """

    def __init__(
        self,
        *,
        home: Path,
        database_url: str,
        dags_folder: Path,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        parallelism: int = 4,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 5.0,
    ) -> None:
        self.home = home.resolve()
        self.api_port = free_port()
        self.base_url = f"http://127.0.0.1:{self.api_port}"
        self._database_url = database_url
        self._dags_folder = dags_folder.resolve()
        self._extra = dict(environment or {})
        self._python = python
        self._parallelism = parallelism
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._secrets = {
            # One value for all four: they sign and read each other's tokens.
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(32),
            "AIRFLOW__CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        }
        self._processes: dict[Component, SessionProcess] = {}
        self._started_at: dict[Component, datetime] = {}
        self._guard: Guard | None = None

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the processes; an `airflow` command run with it talks to this Airflow."""
        unwanted = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start takes twice as long
        return {
            **kept,
            "PATH": os.pathsep.join([str(Path(self._python).parent), kept.get("PATH", os.defpath)]),
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self._dags_folder),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": str(self._parallelism),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            # Tasks call back here; without it they try port 8080 and every run fails.
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.base_url}/execution/",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.api_port),
            "AIRFLOW__API__BASE_URL": self.base_url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self._database_url,
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "10",
            "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "2",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
            **self._secrets,
            **self._extra,
        }

    def migrate(self) -> None:
        """Create or upgrade Airflow's tables.

        The first call on a fresh installation is slower by some seconds: it writes the .pyc files it misses (a
        compileall beforehand takes longer than it saves).
        """
        self._prepare_home()
        self._run_to_end("db-migrate", [self._python, "-m", "airflow", "db", "migrate"])

    def start(self, components: Iterable[Component] = COMPONENTS) -> None:
        """Start the components that do not run, all at once, without waiting for their health."""
        self._prepare_home()
        if self._guard is None:
            self._guard = Guard()
        for component in components:
            if self.is_running(component):
                continue
            self._started_at[component] = datetime.now(timezone.utc)
            process = SessionProcess(
                [self._python, "-m", "airflow", *COMMANDS[component]],
                log_path=self.log_path(component),
                environment=self.environment(),
                cwd=self.home,
            )
            self._processes[component] = process
            self._guard.add(process)

    def wait_until_healthy(self) -> None:
        """Return when every started component was heard since its start."""
        deadline = time.monotonic() + self._start_timeout_s
        while waiting_for := self._silent_components():
            self._check_alive()
            if time.monotonic() > deadline:
                first = waiting_for[0]
                raise DemoError(
                    f"Airflow was not healthy within {self._start_timeout_s:g} s: no sign of {', '.join(waiting_for)};"
                    f" the end of {self.log_path(first)}:\n{log_tail(self.log_path(first))}"
                )
            time.sleep(HEALTH_POLL_S)

    def health(self) -> dict[str, Any] | None:
        """Return Airflow's own health report, or None while the API server does not answer."""
        try:
            answer = httpx.get(f"{self.base_url}/api/v2/monitor/health", timeout=10, trust_env=False)
            return dict(answer.json()) if answer.status_code == 200 else None
        except (httpx.HTTPError, json.JSONDecodeError):
            return None

    def is_running(self, component: Component) -> bool:
        """Whether the component's own process lives."""
        process = self._processes.get(component)
        return process is not None and process.exit_code is None

    def pid(self, component: Component) -> int:
        """Return the process id of a component that was started."""
        return self._process(component).pid

    def log_path(self, component: str) -> Path:
        """Return where a component's output goes."""
        return self.home / "processes" / f"{component}.log"

    def members(self) -> list[int]:
        """Return every living process of this Airflow, tasks included."""
        return sorted({pid for process in self._processes.values() for pid in process.members()})

    def terminate(self, component: Component, *, timeout_s: float = 15.0) -> None:
        """SIGTERM one component, as a drained pod gets it, and return when it and all it started has ended.

        What is left after `timeout_s` is killed: a scheduler waits for its running tasks, and an idle one does not
        always find its way out (Airflow 3.3).
        """
        self._end([component], timeout_s=timeout_s)

    def kill(self, component: Component) -> None:
        """SIGKILL one component and all it started, running tasks included, as the loss of its host would."""
        self._process(component).kill()
        self._forget(component)

    def restart(self, component: Component) -> None:
        """Terminate one component if it runs, start it again, and return when it is healthy."""
        if self.is_running(component):
            self.terminate(component)
        self.start([component])
        self.wait_until_healthy()

    def stop(self) -> None:
        """Terminate all; what does not end in time is killed, and nothing survives."""
        self._end(list(self._processes), timeout_s=self._stop_timeout_s)
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def __enter__(self) -> AirflowProcesses:
        try:
            self.migrate()
            self.start()
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _process(self, component: Component) -> SessionProcess:
        if component not in self._processes:
            raise DemoError(f"the {component} of Airflow is not running: call start() first")
        return self._processes[component]

    def _prepare_home(self) -> None:
        (self.home / "processes").mkdir(parents=True, exist_ok=True)

    def _run_to_end(self, name: str, command: list[str]) -> None:
        log_path = self.log_path(name)
        process = SessionProcess(command, log_path=log_path, environment=self.environment(), cwd=self.home)
        try:
            in_time = process.wait(timeout_s=self._start_timeout_s)
        finally:
            process.kill()
        if not in_time or process.exit_code != 0:
            how = f"ended with {process.exit_code}" if in_time else f"took more than {self._start_timeout_s:g} s"
            raise DemoError(f"{' '.join(command[1:4])} {how}; the end of {log_path}:\n{log_tail(log_path)}")

    def _silent_components(self) -> list[Component]:
        report = self.health()
        if report is None or report.get("metadatabase", {}).get("status") != "healthy":
            return list(self._processes)
        return [
            component
            for component, (key, heartbeat) in HEALTH_KEYS.items()
            if component in self._processes and not self._heard(component, report.get(key) or {}, heartbeat)
        ]

    def _heard(self, component: Component, report: dict[str, Any], heartbeat: str) -> bool:
        # The status alone stays "healthy" for 30 s after a death: a restart is only seen in the heartbeat.
        last = report.get(heartbeat)
        if report.get("status") != "healthy" or not last:
            return False
        return datetime.fromisoformat(str(last).replace("Z", "+00:00")) >= self._started_at[component]

    def _check_alive(self) -> None:
        for component, process in self._processes.items():
            if process.exit_code is not None:
                raise DemoError(
                    f"the {component} of Airflow ended with {process.exit_code} before it was healthy;"
                    f" the end of {process.log_path}:\n{log_tail(process.log_path)}"
                )

    def _end(self, components: list[Component], *, timeout_s: float) -> None:
        processes = {component: self._process(component) for component in components}
        seen = {pid for process in processes.values() for pid in process.members()}
        for process in processes.values():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in processes.values():
            process.wait(timeout_s=max(0.0, deadline - time.monotonic()))
        for component, process in processes.items():
            process.kill()
            self._forget(component)
        self._kill_strays(seen)

    def _kill_strays(self, seen: set[int]) -> None:
        """Kill what opened a session of its own and lost its parent; ours alone carry this AIRFLOW_HOME."""
        for pid in seen & pids_with_environment(f"AIRFLOW_HOME={self.home}"):
            for member in family(pid):
                send_signal(member, signal.SIGKILL)

    def _forget(self, component: Component) -> None:
        process = self._processes.pop(component)
        if self._guard is not None:
            self._guard.remove(process)
