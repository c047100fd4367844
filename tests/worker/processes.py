"""Real workers in processes of their own, and waiting for what the database says of their work."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from airflow_dbpartition.config import Timings
from airflow_dbpartition.demo.processes import Guard, SessionProcess, log_tail
from airflow_dbpartition.domain import ExecutionStatus, JobExecution, JobSettings, NodeView, Partition
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.reading import PartitionRow
from tests import scenarios
from tests.databases import Database

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps_of_workers.py"
OTHER_STEPS = HERE / "other_steps.py"
PATIENCE_S = 60.0  # for one thing; the machine may be busy with much else

# Nobody is taken for dead in tests of other things, however busy the machine is.
CALM = Timings(
    heartbeat_s=0.5, unreachable_after_s=10.0, remove_after_s=30.0, sweep_s=0.3, poll_s=0.2, steal_after_s=0.3
)
# A failover takes seconds.
QUICK = Timings(
    heartbeat_s=0.3, unreachable_after_s=2.0, remove_after_s=4.0, sweep_s=0.3, poll_s=0.2, steal_after_s=0.3
)

T = TypeVar("T")


def wait_until(
    look: Callable[[], T | None], what: str, *, timeout_s: float = PATIENCE_S, logs: Sequence[Path] = ()
) -> T:
    """Return the first answer that is neither None, nor False, nor an empty list."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found is not None and found is not False and found != []:
            return found
        if time.monotonic() > deadline:
            tails = "\n".join(f"{path.name}:\n{log_tail(path)}" for path in logs)
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}\n{tails}")
        time.sleep(0.03)


def is_alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


class Note(NamedTuple):
    """One line that a step has written to its trace."""

    what: str
    partition_key: str
    attempt: int
    node_id: str
    idempotency_key: str
    pid: int


class Node:
    """One worker process."""

    def __init__(self, name: str, process: SessionProcess, fleet: Fleet) -> None:
        self.name = name
        self.process = process
        self.pid = process.pid
        self.log_path = process.log_path
        self._fleet = fleet

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def views(self, *, include_removed: bool = True) -> list[NodeView]:
        """Its lives in the database, in no order."""
        nodes = self._fleet.repository.nodes.all(include_removed=include_removed)
        return [node for node in nodes if node.node_id.startswith(f"{self.name}-")]

    @property
    def node_id(self) -> str:
        """The id of its only life."""
        (view,) = self.views()
        return view.node_id

    def wait_until_live(self) -> Node:
        def live() -> bool:
            assert self.process.exit_code is None, f"{self.name} ended:\n{log_tail(self.log_path)}"
            return bool(self.views(include_removed=False))

        wait_until(live, f"{self.name} is a node", logs=[self.log_path])
        return self

    def children(self) -> list[int]:
        """The processes that run partitions."""
        return [pid for pid in self.process.members() if pid != self.pid]

    def send(self, signal_number: int) -> None:
        self.process.send(signal_number)

    def says(self, words: str, *, times: int = 1) -> None:
        """Wait until its log holds the words so many times."""
        wait_until(lambda: self.log.count(words) >= times, f"{self.name} logs {words!r}", logs=[self.log_path])

    def exits(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end, and return the exit code."""
        assert self.process.wait(timeout_s=timeout_s), f"{self.name} did not end:\n{log_tail(self.log_path)}"
        code = self.process.exit_code
        assert code is not None
        return code


class Job:
    """One job execution, as it comes along."""

    def __init__(self, fleet: Fleet, job_execution_id: int) -> None:
        self._fleet = fleet
        self.id = job_execution_id

    def execution(self) -> JobExecution:
        return self._fleet.repository.reading.execution(self.id)

    def partitions(self) -> dict[str, PartitionRow]:
        return {row.partition_key: row for row in self._fleet.repository.reading.partitions(self.id)}

    def partition(self, key: str = "p0") -> PartitionRow:
        return self.partitions()[key]

    def counts(self) -> dict[str, int]:
        return dict(Counter(row.status.value for row in self.partitions().values()))

    def events(self) -> list[str]:
        return scenarios.event_names(self._fleet.repository, self.id)

    def column(self, name: str) -> list[Any]:
        return scenarios.column(self._fleet.repository, self.id, name)

    def ends(self, *, timeout_s: float = PATIENCE_S) -> str:
        """Wait for the end of the execution, and return its status."""

        def ended() -> ExecutionStatus | None:
            status = self.execution().status
            return None if status.is_active else status

        return wait_until(ended, f"job execution {self.id} ends", timeout_s=timeout_s, logs=self._fleet.log_paths).value

    def wait_for(self, key: str = "p0", *, status: str = "CLAIMED") -> PartitionRow:
        """Wait until the partition has the status."""

        def found() -> PartitionRow | None:
            row = self.partition(key)
            return row if row.status.value == status else None

        return wait_until(found, f"partition {key} is {status}", logs=self._fleet.log_paths)

    def wait_for_counts(self, **counts: int) -> None:
        wait_until(lambda: self.counts() == counts, f"the partitions are {counts}", logs=self._fleet.log_paths)

    def stop(self) -> None:
        self._fleet.repository.executions.stop(self.id, reason="the test says so")


class Fleet:
    """Workers on one database. Use it as a context manager: none survives the block.

    Args:
        database: where the tables are.
        repository: on that database.
        directory: for logs, gates and traces.
        guard: ends the workers when the tests themselves are killed.
        timings: of every worker that is given no others.
    """

    def __init__(
        self, database: Database, repository: JobRepository, directory: Path, guard: Guard, timings: Timings = CALM
    ) -> None:
        self.database = database
        self.repository = repository
        self.directory = directory
        self.trace = directory / "trace"
        self.timings = timings
        self._guard = guard
        self.nodes: list[Node] = []
        self._jobs = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_error: object) -> None:
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                node.send(signal.SIGCONT)
            node.process.kill()
            self._guard.remove(node.process)

    @property
    def log_paths(self) -> list[Path]:
        return [node.log_path for node in self.nodes]

    def start(
        self,
        name: str = "node",
        *,
        imports: Path | str = STEPS,
        url: str | None = None,
        timings: Timings | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        **options: Any,
    ) -> Node:
        """Start a worker whose node id begins with `name`; further options as on the command line, `_` for `-`."""
        times = timings or self.timings
        options = {
            "import": imports,
            "node_prefix": name,
            "heartbeat": times.heartbeat_s,
            "unreachable_after": times.unreachable_after_s,
            "remove_after": times.remove_after_s,
            "sweep": times.sweep_s,
            "poll": times.poll_s,
            "steal_after": times.steal_after_s,
            **options,
        }
        process = SessionProcess(
            [sys.executable, "-m", "airflow_dbpartition.cli", "worker", *_words(options)],
            log_path=self.directory / f"{name}.log",
            environment={
                **os.environ,
                "DBPARTITION_DATABASE_URL": url or self.database.url,
                "DBPARTITION_SCHEMA": self.database.schema or "",
                **(environment or {}),
            },
            cwd=HERE.parent.parent,
        )
        self._guard.add(process)
        node = Node(name, process, self)
        self.nodes.append(node)
        return node.wait_until_live() if wait else node

    # --- jobs --------------------------------------------------------------------------------------------------

    def submit(
        self,
        partitions: int | Sequence[Partition] = 1,
        *,
        to: str | None = None,
        settings: JobSettings | None = None,
        context: dict[str, Any] | None = None,
        transferable: bool | str | None = None,
        **new: Any,
    ) -> Job:
        """Submit a job of its own name; `context` goes to each of the numbered partitions, with the trace."""
        self._jobs += 1
        if isinstance(partitions, int):
            partitions = [
                Partition(
                    f"p{number}",
                    {"number": number, "trace": str(self.trace), **(context or {})},
                    transferable=transferable,
                )
                for number in range(partitions)
            ]
        launched = scenarios.submit(
            self.repository, partitions, job=f"job {self._jobs}", to=to, settings=settings, **new
        )
        return Job(self, launched.job_execution_id)

    def gated(self, partitions: int = 1, *, do: str = "wait", polite: bool = True, **submit: Any) -> tuple[Job, Path]:
        """A job whose partitions wait until the returned file is there."""
        gate = self.directory / f"gate {self._jobs + 1}"
        return self.submit(partitions, context={"do": do, "gate": str(gate), "polite": polite}, **submit), gate

    def notes(self, what: str | None = None) -> list[Note]:
        """What the steps have written to the trace, in order."""
        if not self.trace.exists():
            return []
        notes = []
        for line in self.trace.read_text().splitlines():
            said, key, attempt, node_id, idempotency_key, pid = line.split()
            notes.append(Note(said, key, int(attempt), node_id, idempotency_key, int(pid)))
        return [note for note in notes if what in (None, note.what)]

    def wait_for_note(self, what: str, *, times: int = 1) -> Note:
        """Wait until the trace has so many notes of a kind, and return the last of these."""

        def found() -> Note | None:
            notes = self.notes(what)
            return notes[times - 1] if len(notes) >= times else None

        return wait_until(found, f"{times} x {what!r} in the trace", logs=self.log_paths)


def _words(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is False:
            words.append(f"--no-{name.replace('_', '-')}")
        else:
            words += [option] if value is True else [option, str(value)]
    return words
