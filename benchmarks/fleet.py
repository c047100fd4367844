"""The project's own workers, as real processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.demo.processes import Guard, SessionProcess, log_tail
from airflow_dbpartition.repository import JobRepository

STEPS = Path(__file__).resolve().parent / "steps.py"
PATIENCE_S = 60.0
LEAVING_S = 30.0


class Fleet:
    """Workers on one migrated database.

    Args:
        url: SQLAlchemy URL of a database.
        directory: where logs go.
    """

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.repository = JobRepository.connect(DatabaseConfig(url=url))
        self.workers: list[SessionProcess] = []
        self._guard = Guard()

    def start(
        self,
        workers: int,
        *,
        executor: str,
        concurrency: int,
        options: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[SessionProcess]:
        """Start workers and return when all of them have registered.

        Args:
            options: more of `dbpartition worker`'s, such as `{"--poll": 5}`.
            environment: variables beside our own.
        """
        given = {
            "--import": STEPS,
            "--executor": executor,
            "--concurrency": concurrency,
            "--log-level": "warning",
            **(options or {}),
        }
        words = [str(word) for option in given.items() for word in option]
        first = len(self.workers)
        for number in range(first, first + workers):
            process = SessionProcess(
                [sys.executable, "-m", "airflow_dbpartition.cli", "worker", "--node-prefix", f"w{number}", *words],
                log_path=self.directory / f"w{number}.log",
                environment={**os.environ, "DBPARTITION_DATABASE_URL": self.url, **(environment or {})},
                cwd=self.directory,
            )
            self._guard.add(process)
            self.workers.append(process)
        deadline = time.monotonic() + PATIENCE_S
        while len(self.node_ids()) < len(self.workers):
            dead = [worker for worker in self.workers if worker.exit_code is not None]
            if dead or time.monotonic() > deadline:
                raise SystemExit(f"a worker did not start:\n{log_tail((dead or self.workers)[0].log_path)}")
            time.sleep(0.05)
        return self.workers[first:]

    def node_ids(self) -> list[str]:
        """The nodes that are registered now."""
        return sorted(node.node_id for node in self.repository.nodes.all())

    def stop(self) -> None:
        """Let every worker leave, and end whoever does not."""
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            if not worker.wait(timeout_s=LEAVING_S):
                worker.kill()
            self._guard.remove(worker)
        self.workers.clear()

    def close(self) -> None:
        self.stop()
        self._guard.close()
        self.repository.close()


@contextmanager
def fleet(url: str) -> Iterator[Fleet]:
    """Create the tables in a fresh database, and end with it every worker that was started on it."""
    with tempfile.TemporaryDirectory() as place:
        arena = Fleet(url, Path(place))
        try:
            migrations.upgrade(arena.repository.engine)
            yield arena
        finally:
            arena.close()
