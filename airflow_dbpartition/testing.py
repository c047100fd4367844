"""For the tests of DAGs and steps: a job repository in a file, and a worker in the test's own process.

    def test_my_dag(tmp_path):
        with local_worker(tmp_path, imports=["my_steps"]) as jobs:
            run = dag.test()
            assert run.state == "success", jobs.report()
            assert jobs.summary()["partitions"]["completed"] == 4

Nothing here imports Airflow, so the author of a step can test it where there is none.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig, Timings, WorkerConfig
from airflow_dbpartition.dialects import make_engine
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP, JobExecution, JobIdentity, JobSettings
from airflow_dbpartition.errors import (
    ConfigurationError,
    DatabaseError,
    JobExecutionNotFoundError,
    UnknownStepError,
)
from airflow_dbpartition.failure_texts import headline
from airflow_dbpartition.launching import Job, Launcher
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.storable import JsonObject
from airflow_dbpartition.worker.metrics import Metrics
from airflow_dbpartition.worker.node import Worker, new_node_id, package_version
from airflow_dbpartition.worker.runner import FAILED, run_claim
from airflow_dbpartition.worker.settling import Settling
from airflow_dbpartition.worker.steps import StepFunction, load_steps, registered_steps, standing_in

__all__ = ["LocalJobRepository", "local_job_repository", "local_worker", "run_pending"]

CONN_ID = "dbpartition_default"
FILE_NAME = "job-repository.sqlite"

# Work is found at once; and nobody is taken for dead, since what looks dead here is a process in a debugger.
TIMINGS = Timings(heartbeat_s=0.5, unreachable_after_s=30.0, remove_after_s=86_400.0, poll_s=0.05, steal_after_s=0.2)
# A task that waits looks as often as this, whatever its own intervals, and gives up where nobody would do the work.
WAITS = {"longest_poll_interval_s": 0.2, "longest_no_nodes_timeout_s": 30.0}

_LOOK_S = 0.02
_REPORTED_EXECUTIONS = 100
_REPORTED_FAILURES = 10
_ALL = 1_000_000

log = structlog.get_logger("dbpartition.testing")

_files: dict[str, Path] = {}  # of the connections that are set now


class LocalJobRepository(JobRepository):
    """The job repository of a test, in a SQLite file; what it holds can be asked for in a line.

    `job` is the id of a job execution, or a job's name (`dag_id.task_id`, unless the DAG says otherwise); without it,
    the job that was launched last. Of a job that was restarted, the last restart is what counts.

    Attributes:
        path: the file.
        url: what `--database-url` takes.
        engine: an SQLAlchemy engine on the file, for tables of the test's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        super().__init__(make_engine(DatabaseConfig(url=self.url, pool_size=0)))

    def submit(
        self,
        step: str,
        partitions: Mapping[str, JsonObject],
        *,
        settings: JobSettings | None = None,
        node_group: str = DEFAULT_NODE_GROUP,
    ) -> int:
        """Write a job without Airflow, each time another one; returns the job execution's id.

        Args:
            step: the step's registered name; it is also the job's name.
            partitions: key to execution context.
            settings: retries, timeouts and so on.
            node_group: whose nodes do the work.

        Raises:
            InvalidPartitionError: a context cannot be stored.
            UnknownStepError: a worker is there, and does not know the step.
        """
        job = Job(
            identity=JobIdentity(step, {"submitted": secrets.token_hex(8)}),
            step_name=step,
            partitioner=dict(partitions),
            node_group=node_group,
            settings=settings or JobSettings(),
            manager={"launched_by": "airflow_dbpartition.testing"},
            owner_token=secrets.token_hex(16),
        )
        return Launcher(self, timings=TIMINGS).launch(job).job_execution_id

    def summary(self, job: int | str | None = None) -> JsonObject:
        """Counts and summed counters, as the sensor returns them.

        Raises:
            JobExecutionNotFoundError: there is no such job.
        """
        return self.reading.summary(self._latest(job).job_execution_id).to_json()

    def results(self, job: int | str | None = None) -> dict[str, Any]:
        """What the step returned, by partition key, of the completed partitions.

        Raises:
            JobExecutionNotFoundError: there is no such job.
        """
        return dict(self.reading.iter_results(self._latest(job).job_execution_id))

    def errors(self, job: int | str | None = None) -> dict[str, str]:
        """The traceback (or another text) of each failed partition, by partition key; empty where none has failed.

        Raises:
            JobExecutionNotFoundError: there is no such job.
        """
        failures = self.reading.failures(self._latest(job).job_execution_id, limit=_ALL)
        return {failure.partition_key: failure.message for failure in failures}

    def report(self) -> str:
        """All jobs and what failed in them, for the message of an `assert`."""
        executions = self.reading.recent(limit=_REPORTED_EXECUTIONS)
        return "\n".join(self._described(execution) for execution in reversed(executions)) or "no job was launched"

    def _described(self, execution: JobExecution) -> str:
        counts = self.reading.progress([execution.job_execution_id])[execution.job_execution_id].counts
        told = ", ".join(f"{number} {status}" for status, number in counts.items()) or "no partitions"
        lines = [f"job execution {execution.job_execution_id} ({execution.job_name}): {execution.status} ({told})"]
        for failure in self.reading.failures(execution.job_execution_id, limit=_REPORTED_FAILURES):
            lines.append(f"  partition {failure.partition_key!r}, attempt {failure.attempt}:")
            lines.append(textwrap.indent(failure.message, "    "))
        return "\n".join(lines)

    def _latest(self, job: int | str | None) -> JobExecution:
        if isinstance(job, int):
            return self.reading.latest_of_instance(job)
        found = self.reading.recent(limit=1, job_name=job)
        if not found:
            raise JobExecutionNotFoundError(
                "no job was launched yet" if job is None else f"no job {job!r} was launched; {self.report()}"
            )
        return found[0]


@contextmanager
def local_job_repository(directory: str | os.PathLike[str], *, conn_id: str = CONN_ID) -> Iterator[LocalJobRepository]:
    """A job repository in a SQLite file, which is Airflow's connection `conn_id` inside the block; nothing works on it.

    For tests that call `run_pending` when they want the partitions to run. Tasks that wait look every 0.2 s, whatever
    their `poll_interval` or `poke_interval`, and give up after 30 s without a node that could do the work.

    Args:
        directory: where the file is made, such as pytest's `tmp_path`. What an earlier block left there is still there.
        conn_id: the Airflow connection that the DAG's tasks use (`repository_conn_id`).

    Raises:
        ConfigurationError: the directory cannot be written to, or the connection is in use for another one.
    """
    path = _made(Path(directory))
    known = _files.get(conn_id)
    if known not in (None, path):
        raise ConfigurationError(
            f"the connection {conn_id!r} is that of {known} already, in a block that has not ended: "
            f"leave that block before, give both the same directory, or another conn_id"
        )
    repository = LocalJobRepository(path)
    migrations.upgrade(repository.engine)
    timings = {name: value for name, value in asdict(TIMINGS).items() if value is not None}
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    before = os.environ.get(variable)
    os.environ[variable] = json.dumps({"conn_type": "sqlite", "host": str(path), "extra": {**timings, **WAITS}})
    _files[conn_id] = path
    try:
        yield repository
    finally:
        if known is None:
            del _files[conn_id]
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
        repository.close()


@contextmanager
def local_worker(
    directory: str | os.PathLike[str],
    imports: Iterable[str] = (),
    *,
    steps: Mapping[str, StepFunction] | None = None,
    concurrency: int = 1,
    node_group: str = DEFAULT_NODE_GROUP,
    conn_id: str = CONN_ID,
) -> Iterator[LocalJobRepository]:
    """A job repository in a SQLite file, and inside the block a worker on it, in threads of this process.

    All else is as in `local_job_repository`. Blocks may be nested on one directory, for a second node or another node
    group. At the block's end the worker leaves at once: what it still runs is asked to stop.

    Args:
        directory: as in `local_job_repository`.
        imports: modules or .py files that register steps, as `dbpartition worker --import` takes them. Steps that are
            decorated in the test's own module, or were imported by it, are known without.
        steps: functions that stand in for steps inside the block, by the step's name.
        concurrency: partitions run at once, each in a thread of its own.
        node_group: the label whose executions this worker works for.
        conn_id: as in `local_job_repository`.

    Raises:
        ConfigurationError: as in `local_job_repository`; a module cannot be imported; there is no step at all.
    """
    with local_job_repository(directory, conn_id=conn_id) as repository, _known(imports, steps):
        config = WorkerConfig(
            concurrency=concurrency,
            node_group=node_group,
            node_prefix="local",
            executor="thread",
            grace_s=0.0,
            timings=TIMINGS,
        )
        with _working(Worker(DatabaseConfig(url=repository.url), config)):
            yield repository


def run_pending(
    repository: JobRepository,
    imports: Iterable[str] = (),
    *,
    steps: Mapping[str, StepFunction] | None = None,
    node_group: str = DEFAULT_NODE_GROUP,
) -> int:
    """Run all waiting partitions in the calling thread, one after the other, until none is left.

    What is retried is waited for. No heartbeat is sent meanwhile: the database should be the test's own.

    Args:
        repository: where, such as a `LocalJobRepository`.
        imports, steps: as in `local_worker`.
        node_group: the label whose executions are looked at.

    Returns:
        How many attempts were made.

    Raises:
        ConfigurationError: a module cannot be imported; there is no step at all.
        UnknownStepError: partitions are left whose step nobody has registered here; all others were run.
        DatabaseError: the database refused.
    """
    recovery = Recovery(repository, TIMINGS)
    settling = Settling(repository, recovery, Metrics())
    attempts = 0
    with _known(imports, steps) as names:
        node_id = new_node_id("run-pending")
        repository.nodes.register(
            node_id=node_id,
            node_group=node_group,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=package_version()[:50],
            capacity=1,
            steps=names,
        )
        try:
            while repository.claims.waiting(node_id=node_id, node_group=node_group, steps=names):
                claims = repository.claims.claim(
                    node_id=node_id, node_group=node_group, steps=names, limit=1, steal_after_s=0.0
                )
                if not claims:
                    time.sleep(_LOOK_S)  # the delay of a retry
                for claim in claims:
                    attempts += 1
                    repository.claims.mark_started(claim.job_execution_id)
                    outcome = run_claim(claim, repository, lambda: False)
                    settling.settle(claim, outcome, stop_requested=False)
                    settling.flush()
                    if outcome.kind == FAILED and headline(outcome.message) == "KeyboardInterrupt":
                        raise KeyboardInterrupt
                    if not settling.is_idle:
                        raise DatabaseError(f"the end of partition {claim.partition_key!r} could not be written")
        finally:
            recovery.leave(node_id)
        unknown = repository.claims.waiting_for_others(node_group=node_group, steps=names)
    if unknown:
        raise UnknownStepError(
            f"partitions wait for {', '.join(map(repr, unknown))}, which nobody has registered here "
            f"(registered: {', '.join(names)}): name the module in imports, or correct the name"
        )
    return attempts


def _made(directory: Path) -> Path:
    path = directory.resolve() / FILE_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigurationError(f"cannot keep a job repository in {directory}: {error}") from None
    return path


@contextmanager
def _known(imports: Iterable[str], steps: Mapping[str, StepFunction] | None) -> Iterator[tuple[str, ...]]:
    """The names of all steps inside the block."""
    if isinstance(imports, (str, os.PathLike)):
        raise ConfigurationError(f"expected imports to be a list of modules or .py files, got {imports!r}")
    load_steps([str(module) for module in imports])
    with standing_in(steps or {}):
        names = tuple(sorted(registered_steps()))
        if not names:
            raise ConfigurationError(
                "there is no step: name the modules that register some (imports=[...]), decorate functions of the "
                'test with @step("name"), or give functions that stand in (steps={"name": function})'
            )
        yield names


@contextmanager
def _working(worker: Worker) -> Iterator[None]:
    """The worker runs in a thread inside the block; what it failed of is raised at the block's end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            log.error("the local worker has failed", error=str(error))
            failures.append(error)

    thread = threading.Thread(target=run, name="dbpartition-local-worker", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not worker.node_id:
            thread.join(_LOOK_S)
        if not failures:
            yield
    finally:
        worker.stop()
        thread.join()
    if failures:
        raise failures[0]
