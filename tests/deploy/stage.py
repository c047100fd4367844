"""docker-compose.yaml without Docker: each service's command, with its environment, as a process of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from airflow_dbpartition.demo.embedded import EmbeddedPostgres, find_installation
from airflow_dbpartition.demo.processes import Guard, SessionProcess, free_port, log_tail
from tests.deploy.files import ROOT, dockerfile, services

AIRFLOW_HEALTH_PORT = "8974"  # Airflow's default for the scheduler's health server
PROGRAMS = {"airflow": "airflow", "dbpartition": "airflow_dbpartition.cli", "python": None}


class Stage:
    """Starts the services of the compose file against an embedded PostgreSQL; host names and ports are replaced.

    Args:
        directory: for data, logs and AIRFLOW_HOME.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.services = services()
        self._stack = contextlib.ExitStack()
        self._ports = {name: free_port() for name in ("api-server", "scheduler", "worker")}
        self.processes: dict[str, SessionProcess] = {}

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            directory = self.directory / "postgres"
            self.postgres = stack.enter_context(EmbeddedPostgres(directory=directory, settings={"fsync": "off"}))
            self._guard = Guard()
            stack.callback(self._guard.close)
            (self.directory / "airflow").mkdir()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
        self._stack.close()

    # --- what is replaced --------------------------------------------------------------------------------------

    def local(self, text: str, service: str = "") -> str:
        """A value of the compose file as it is right on this machine."""
        api = f"http://127.0.0.1:{self._ports['api-server']}"
        replaced = {
            "@postgres:5432": f"@127.0.0.1:{self.postgres.port}",
            "http://api-server:8080": api,
            "http://localhost:8080": api,
            f"localhost:{AIRFLOW_HEALTH_PORT}": f"127.0.0.1:{self._ports['scheduler']}",
            "/opt/airflow/dags": str(ROOT / "dags"),
        }
        if service == "worker":
            replaced["127.0.0.1:8080"] = f"127.0.0.1:{self._ports['worker']}"
        for there, here in replaced.items():
            text = text.replace(there, here)
        return text

    def environment(self, service: str) -> dict[str, str]:
        """The service's environment, and what its image would have set."""
        foreign = ("AIRFLOW", "DBPARTITION", "PG")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        declared = self.services[service].get("environment", {})
        found = {**kept, **{name: self.local(value, service) for name, value in declared.items()}, "NO_PROXY": "*"}
        if self.services[service]["image"].startswith("dbpartition-airflow"):
            found |= {
                "AIRFLOW_HOME": str(self.directory / "airflow"),
                "AIRFLOW__API__HOST": "127.0.0.1",
                "AIRFLOW__API__PORT": str(self._ports["api-server"]),
                "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_PORT": str(self._ports["scheduler"]),
            }
        if self.services[service]["image"].startswith("dbpartition-worker"):
            found = {**dockerfile("worker").environment, **found}
            found["DBPARTITION_HEALTH_PORT"] = str(self._ports["worker"])
        return found

    def command(self, service: str, words: list[str] | None = None) -> list[str]:
        """The service's command, or another of its container, with this Python's programs."""
        declared = self.services[service]
        if words is None:
            image = dockerfile(Path(declared["build"]["dockerfile"]).name.removesuffix(".Dockerfile"))
            words = [*image.entrypoint, *declared["command"]]
        program, *rest = (self.local(word, service) for word in words)
        module = PROGRAMS[program]
        return [sys.executable, *(["-m", module] if module else []), *rest]

    def _directory_of(self, service: str) -> Path:
        workdir = dockerfile("worker").workdir
        for volume in self.services[service].get("volumes", []):
            source, target = str(volume).split(":")[:2]
            if target == workdir:
                return ROOT / source
        return self.directory

    # --- running -----------------------------------------------------------------------------------------------

    def create_databases(self) -> None:
        """Run what the postgres image runs on an empty data directory."""
        (script,) = (ROOT / "deploy" / "postgres").glob("*.sh")
        path = os.pathsep.join([str(find_installation() / "bin"), os.environ.get("PATH", os.defpath)])
        where = {"PGHOST": "127.0.0.1", "PGPORT": str(self.postgres.port), "PATH": path}
        self._run([str(script)], self.environment("postgres") | where, self.directory)

    def run(self, service: str, words: list[str] | None = None) -> str:
        """Run a one-shot service, or a command inside one's container, to its end; returns its output."""
        return self._run(self.command(service, words), self.environment(service), self._directory_of(service))

    def _run(self, command: list[str], environment: dict[str, str], directory: Path) -> str:
        done = subprocess.run(
            command,
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        return done.stdout

    def start(self, *names: str) -> None:
        """Start services that stay."""
        for name in names:
            process = SessionProcess(
                self.command(name),
                log_path=self.directory / f"{name}.log",
                environment=self.environment(name),
                cwd=self._directory_of(name),
            )
            self.processes[name] = process
            self._guard.add(process)

    def until(self, what: str, check: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
        """What `check` returns once that is true.

        Raises:
            AssertionError: it took too long, or a process has ended; with the ends of the logs.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = check()
            if found:
                return found
            dead = [name for name, process in self.processes.items() if process.exit_code is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"{name}:\n{log_tail(self.processes[name].log_path)}" for name in self.processes)
                why = f"{dead[0]} ended" if dead else f"not within {timeout_s:g} s"
                raise AssertionError(f"{what}: {why}\n{logs}")
            time.sleep(0.25)

    def get(self, url: str, service: str = "") -> httpx.Response | None:
        """An answer, or None while nobody answers."""
        try:
            return httpx.get(self.local(url, service), timeout=5, trust_env=False)
        except httpx.HTTPError:
            return None
