"""Restarts by other code, on other nodes, and while a zombie of the old execution still runs; and two steps at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from airflow_dbpartition.config import Timings
from airflow_dbpartition.demo.processes import send_signal
from airflow_dbpartition.domain import JobIdentity, JobSettings, Partition, PartitionStatus
from airflow_dbpartition.errors import JobAbandonedError, LostPartitionsError
from airflow_dbpartition.launching import Intent, Job, Launcher
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.reading import PartitionRow
from tests.cli.running import Run, in_process, variables
from tests.conftest import LONG
from tests.databases import Database
from tests.resilience.ledgers import HERE, STEP, STEPS, Entry, Ledgers, Verdict, judge
from tests.worker.processes import CALM, Fleet, Node, wait_until
from tests.worker.proxy import HEARTBEAT, Proxy

FIRST_CODE = HERE / "steps_of_first_code.py"
MENDED_CODE = STEPS
RELEASES = HERE / "steps_of_releases.py"
ONCE_OR_OFTEN = range(3 if LONG else 1)
# A worker that does not fence itself for a minute: nothing but the database stands in the way of what it writes.
TRUSTING = Timings(
    heartbeat_s=0.3, unreachable_after_s=30.0, remove_after_s=60.0, sweep_s=0.3, poll_s=0.2, steal_after_s=0.3
)


class Planner:
    """A partitioner that notes how often it is asked."""

    def __init__(self, plan: Sequence[Partition]) -> None:
        self._plan = plan
        self.grid_sizes: list[int] = []

    def __call__(self, grid_size: int) -> Sequence[Partition]:
        self.grid_sizes.append(grid_size)
        return self._plan

    def job(self, **options: object) -> Job:
        return Job(JobIdentity("dag.restarted", {"run_id": "run"}), STEP, self, **options)  # type: ignore[arg-type]


@pytest.fixture
def dbpartition(own_database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name, value in variables(own_database).items():
        monkeypatch.setenv(name, value)
    return partial(in_process, capsys)


# --- other code, another number of nodes -------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize(
    ("nodes_before", "nodes_after", "policy"),
    [
        (1, 3, "until_started"),
        pytest.param(3, 1, True, marks=pytest.mark.resilience_long),
        pytest.param(3, 2, False, marks=pytest.mark.resilience_long),
    ],
)
def test_after_a_failure_mended_code_on_another_number_of_nodes_does_only_the_rest(
    own_fleet: Fleet, ledgers: Ledgers, nodes_before: int, nodes_after: int, policy: bool | str, turn: int
) -> None:
    own_fleet.timings = CALM
    planner = Planner(
        ledgers.plan(8, transferable=policy, prefix="well", units=4)
        + ledgers.plan(6, transferable=policy, prefix="broken", units=4, broken_at=2)
    )
    launcher = Launcher(own_fleet.repository, timings=CALM)
    with _nodes(own_fleet, "old", nodes_before, FIRST_CODE):
        first = launcher.launch(planner.job()).job_execution_id
        assert _ends(own_fleet, first) == "FAILED"
    rows_of_first = _rows(own_fleet.repository, first)
    assert _counts(rows_of_first) == {"COMPLETED": 8, "FAILED": 6}

    with _nodes(own_fleet, "new", nodes_after, MENDED_CODE):
        second = launcher.launch(planner.job()).job_execution_id  # as the retry of the task does
        assert second != first
        assert _ends(own_fleet, second) == "COMPLETED"

    assert planner.grid_sizes == [nodes_before]
    _assert_only_the_rest_ran(own_fleet.repository, ledgers, rows_of_first, first, second)
    for row in _rows(own_fleet.repository, second).values():
        assert _writers(ledgers, own_fleet.repository, second, row.partition_key) == ["old", "old", "new", "new"]
    verdict = verdict_over_restarts(ledgers, [first, second])
    print(f"FAILED on {nodes_before} nodes, restarted on {nodes_after}: {verdict}")
    assert verdict.faults == []
    assert verdict.entered_again == 6


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize("nodes_after", [1, pytest.param(3, marks=pytest.mark.resilience_long)])
def test_after_a_stop_mended_code_on_another_number_of_nodes_does_only_the_rest(
    own_fleet: Fleet, ledgers: Ledgers, dbpartition: Run, nodes_after: int, turn: int
) -> None:
    own_fleet.timings = CALM
    held: dict[str, Any] = {"held": "between", "gate": str(own_fleet.directory / "never")}
    planner = Planner(
        ledgers.plan(4, transferable="until_started", prefix="well", units=4)
        + ledgers.plan(4, transferable="until_started", prefix="held", units=4, **held)
        + ledgers.plan(8, transferable="until_started", prefix="waiting", units=4)
    )
    with _nodes(own_fleet, "old", 2, FIRST_CODE):
        first = Launcher(own_fleet.repository, timings=CALM).launch(planner.job()).job_execution_id
        _wait_for_entries(own_fleet, ledgers, "held", 4)
        dbpartition("stop", first).well()
        assert _ends(own_fleet, first) == "STOPPED"
    rows_of_first = _rows(own_fleet.repository, first)
    assert _counts(rows_of_first) == {"COMPLETED": 4, "STOPPED": 12}

    with _nodes(own_fleet, "new", nodes_after, MENDED_CODE):
        second = dbpartition("restart", first, "--json").well().data["job_execution_id"]
        assert _ends(own_fleet, second) == "COMPLETED"

    assert planner.grid_sizes == [2]
    _assert_only_the_rest_ran(own_fleet.repository, ledgers, rows_of_first, first, second)
    for row in _rows(own_fleet.repository, second).values():
        began_by = "old" if row.partition_key.startswith("held") else "new"
        written_by = _writers(ledgers, own_fleet.repository, second, row.partition_key)
        assert written_by == [began_by, "new", "new", "new"], row.partition_key
    verdict = verdict_over_restarts(ledgers, [first, second])
    print(f"STOPPED on 2 nodes, restarted on {nodes_after}: {verdict}")
    assert verdict.faults == []
    assert verdict.entered_again == 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
def test_an_abandoned_execution_is_not_restarted_and_a_clear_plans_all_of_it_anew(
    own_fleet: Fleet, ledgers: Ledgers, dbpartition: Run, turn: int
) -> None:
    own_fleet.timings = CALM
    planner = Planner(
        ledgers.plan(4, transferable="until_started", prefix="well", units=2)
        + ledgers.plan(2, transferable="until_started", prefix="broken", units=2, broken_at=1)
    )
    launcher = Launcher(own_fleet.repository, timings=CALM)
    with _nodes(own_fleet, "old", 1, FIRST_CODE):
        first = launcher.launch(planner.job()).job_execution_id
        assert _ends(own_fleet, first) == "FAILED"
    dbpartition("abandon", first).well()
    rows_of_first = _rows(own_fleet.repository, first)

    with _nodes(own_fleet, "new", 2, MENDED_CODE):
        dbpartition("restart", first).refused(1, f"job execution {first} was abandoned: it is never restarted")
        with pytest.raises(JobAbandonedError, match=f"job execution {first} was abandoned"):
            launcher.launch(planner.job())
        assert len(own_fleet.repository.reading.recent()) == 1
        again = launcher.launch(planner.job(), Intent.CLEARED).job_execution_id
        assert _ends(own_fleet, again) == "COMPLETED"

    assert planner.grid_sizes == [1, 2]
    assert own_fleet.repository.reading.execution(again).generation == 2
    assert own_fleet.repository.reading.execution(first).status == "ABANDONED"
    assert _rows(own_fleet.repository, first) == rows_of_first
    verdict = ledgers.verdict([first, again])
    print(f"ABANDONED, cleared: {verdict}")
    assert verdict.faults == []
    assert (verdict.entries_inside, verdict.entered, verdict.entered_again) == (4 * 2 + 2 * 1 + 6 * 2, 12, 0)


# --- two steps ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
def test_two_steps_of_one_run_that_are_launched_at_once_share_the_fleet_and_nothing_else(
    own_database: Database, own_fleet: Fleet, ledgers: Ledgers, turn: int
) -> None:
    own_fleet.timings = CALM
    other_step, count = "ledger of release 1", 200 if LONG else 30
    able = {"DBPARTITION_TEST_RELEASE": "1"}
    for name in ("both0", "both1"):
        own_fleet.start(name, imports=RELEASES, environment=able, executor="thread", concurrency=2, wait=False)
    own_fleet.start("one", imports=RELEASES, executor="thread", concurrency=2, wait=False)
    for node in own_fleet.nodes:
        node.wait_until_live()
    plan = ledgers.plan(count, transferable="until_started", units=2, pause_s=0.02)
    begin = threading.Barrier(2)

    def launch(task_id: str, step_name: str) -> int:
        repository = JobRepository.connect(own_database.config(pool_size=1))
        try:
            job = Job(JobIdentity(f"dag.{task_id}", {"run_id": "run"}), step_name, lambda _grid_size: plan)
            begin.wait(timeout=30)
            return Launcher(repository, timings=CALM).launch(job).job_execution_id
        finally:
            repository.close()

    with ThreadPoolExecutor(2) as pool:
        launched = [pool.submit(launch, "first", STEP), pool.submit(launch, "second", other_step)]
        jobs = first, second = [future.result(timeout=30) for future in launched]
    assert first != second
    assert [_ends(own_fleet, job) for job in jobs] == ["COMPLETED", "COMPLETED"]

    verdict = ledgers.verdict(jobs)
    print(f"two steps at once: {verdict}")
    assert verdict.faults == []
    assert verdict.entered_again == 0
    results = [dict(own_fleet.repository.reading.iter_results(job)) for job in jobs]
    assert [{result.get("step") for result in found.values()} for found in results] == [{None}, {other_step}]
    assert len({result["key"] for found in results for result in found.values()}) == 2 * count
    nodes = [{_name_of(result["node"]) for result in found.values()} for found in results]
    assert "one" in nodes[0]
    assert nodes[1] == {"both0", "both1"}


# --- zombies -----------------------------------------------------------------------------------------------------

HOLDS = ("between", "inside", "after")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize(
    ("executor", "ending"),
    [
        ("thread", "lost"),
        ("process", "stopped"),
        *(
            pytest.param(executor, ending, marks=pytest.mark.resilience_long)
            for executor, ending in [
                ("thread", "stopped"),
                ("thread", "abandoned"),
                ("process", "lost"),
                ("process", "abandoned"),
            ]
        ),
    ],
)
def test_a_zombie_of_the_old_execution_writes_nothing_into_the_new_one(
    own_fleet: Fleet, ledgers: Ledgers, executor: str, ending: str, turn: int
) -> None:
    repository = own_fleet.repository
    with Proxy(own_fleet.database.url) as proxy:
        zombie = own_fleet.start(
            "zombie",
            imports=FIRST_CODE,
            url=proxy.url,
            timings=TRUSTING,
            executor=executor,
            concurrency=len(HOLDS),
            wait=False,
        )
        own_fleet.start("heir", imports=MENDED_CODE, executor="thread", concurrency=len(HOLDS), wait=False)
        for node in own_fleet.nodes:
            node.wait_until_live()
        gate = own_fleet.directory / "gate"
        policy = "until_started" if ending == "lost" else True
        plan = [
            partition
            for hold in HOLDS
            for partition in ledgers.plan(
                1, transferable=policy, prefix=hold, units=4, pause_s=0.2, held=hold, gate=str(gate)
            )
        ]
        first = own_fleet.submit(plan, to=zombie.node_id, settings=JobSettings(stealing=False), step=STEP)
        _wait_for_entries(own_fleet, ledgers, "held", len(HOLDS))
        pids = zombie.process.members()
        for pid in pids:
            send_signal(pid, signal.SIGSTOP)

        second = _ended_without_the_zombie(own_fleet, first.id, Planner(plan), ending)
        rows_of_first = _rows(repository, first.id)
        _wait_for_entries(own_fleet, ledgers, "entered", 2 * len(HOLDS))  # the heir is in the middle of them
        proxy.freeze(HEARTBEAT)  # or it could hear that it is a zombie before it has done any harm
        gate.touch()
        for pid in pids:
            send_signal(pid, signal.SIGCONT)
        _wait_for_entries(own_fleet, ledgers, "refused", 2)
        zombie.says("claim lost, work dropped", times=2)
        zombie.says("claim lost, outcome dropped")
        assert _ends(own_fleet, second) == "COMPLETED"
        proxy.restore()
        wait_until(
            lambda: sorted(view.status.value for view in zombie.views()) == ["ACTIVE", "REMOVED"],
            "it has begun a new life",
            logs=[zombie.log_path],
        )

    assert _rows(repository, first.id) == rows_of_first
    new_generation = ending == "abandoned"
    done_before = {"between": 1, "inside": 1, "after": 4}
    for hold, units in done_before.items():
        written_by = _writers(ledgers, repository, second, f"{hold}0")
        assert written_by == (["heir"] * 4 if new_generation else ["zombie"] * units + ["heir"] * (4 - units)), hold
    assert [row.assigned_node for row in _rows(repository, second).values()] == [own_fleet.nodes[1].node_id] * 3
    assert {row.status for row in _rows(repository, second).values()} == {PartitionStatus.COMPLETED}
    ids = [first.id, second]
    verdict = ledgers.verdict(ids) if new_generation else verdict_over_restarts(ledgers, ids)
    print(f"zombie (executor {executor}, execution {ending}): {verdict}")
    assert verdict.faults == []


def _ended_without_the_zombie(fleet: Fleet, job_execution_id: int, planner: Planner, ending: str) -> int:
    """End the execution while the zombie is frozen, and begin the next; returns that one."""
    executions, launcher = fleet.repository.executions, Launcher(fleet.repository, timings=fleet.timings)
    if ending == "lost":
        assert _ends(fleet, job_execution_id) == "FAILED"
        with pytest.raises(LostPartitionsError):
            launcher.restart(job_execution_id)
        return launcher.restart(job_execution_id, include_lost=True).job_execution_id
    executions.stop(job_execution_id, reason="the test says so")
    assert _ends(fleet, job_execution_id) == "STOPPED"
    if ending == "stopped":
        return launcher.restart(job_execution_id).job_execution_id
    executions.abandon(job_execution_id)
    identity = JobIdentity(fleet.repository.reading.execution(job_execution_id).job_name)
    job = Job(identity, STEP, planner, settings=JobSettings(transferable="always"))
    return launcher.launch(job, Intent.CLEARED).job_execution_id


# --- looking -----------------------------------------------------------------------------------------------------


def verdict_over_restarts(ledgers: Ledgers, job_execution_ids: Sequence[int]) -> Verdict:
    """The verdict where each execution does the rest of the one before: a partition's last row says how far it is.

    What may not move may be entered once in each execution.
    """
    last = {row.entry_key: row for row in ledgers.partitions(job_execution_ids)}
    attempts = {job_execution_id: number for number, job_execution_id in enumerate(job_execution_ids, start=1)}
    return judge(list(last.values()), ledgers.inside(), ledgers.outside(), attempts=attempts)


def _assert_only_the_rest_ran(
    repository: JobRepository, ledgers: Ledgers, rows_of_first: dict[str, PartitionRow], first: int, second: int
) -> None:
    """The second execution has the first one's unfinished partitions, as they were planned, and goes on from there."""
    assert _rows(repository, first) == rows_of_first
    rest = {key: row for key, row in rows_of_first.items() if row.status is not PartitionStatus.COMPLETED}
    rows_of_second = _rows(repository, second)
    assert list(rows_of_second) == list(rest)
    for key, row in rows_of_second.items():
        assert (row.context, row.weight) == (rest[key].context, rest[key].weight)
    execution = repository.reading.execution(second)
    assert execution.job_instance_id == repository.reading.execution(first).job_instance_id
    counts, counters = (repository.reading.summary(second).to_json()[name] for name in ("partitions", "counters"))
    assert counts["completed"] == counts["total"] == len(rows_of_first)
    assert counters["write"] == sum(row.context["units"] for row in rows_of_first.values())


def _writers(ledgers: Ledgers, repository: JobRepository, job_execution_id: int, partition_key: str) -> list[str]:
    """Who wrote each unit of a partition into the database: the names of the nodes, without their numbers."""
    (row,) = [row for row in ledgers.partitions([job_execution_id]) if row.partition_key == partition_key]
    query = text(f"SELECT node_id FROM {ledgers.table} WHERE entry_key = :key ORDER BY unit")
    with repository.engine.connect() as connection:
        return [
            _name_of(node_id).rstrip("0123456789")
            for node_id in connection.execute(query, {"key": row.entry_key}).scalars()
        ]


def _wait_for_entries(fleet: Fleet, ledgers: Ledgers, what: str, count: int) -> list[Entry]:
    def found() -> list[Entry] | None:
        entries = [entry for entry in ledgers.outside() if entry.what == what]
        return entries if len(entries) >= count else None

    return wait_until(found, f"{count} x {what!r} in the ledger outside", logs=fleet.log_paths)


@contextmanager
def _nodes(fleet: Fleet, name: str, count: int, code: Path) -> Iterator[list[Node]]:
    """So many nodes with this code, until the end of the block: then they are asked to leave."""
    nodes = [
        fleet.start(f"{name}{number}", imports=code, executor="thread", concurrency=2, wait=False)
        for number in range(count)
    ]
    for node in nodes:
        node.wait_until_live()
    yield nodes
    for node in nodes:
        node.send(signal.SIGTERM)
    assert [node.exits() for node in nodes] == [0] * count


def _ends(fleet: Fleet, job_execution_id: int) -> str:
    def ended() -> str | None:
        status = fleet.repository.reading.execution(job_execution_id).status
        return None if status.is_active else status.value

    return wait_until(ended, f"job execution {job_execution_id} ends", logs=fleet.log_paths)


def _rows(repository: JobRepository, job_execution_id: int) -> dict[str, PartitionRow]:
    return {row.partition_key: row for row in repository.reading.partitions(job_execution_id)}


def _counts(rows: dict[str, PartitionRow]) -> dict[str, int]:
    statuses = [row.status.value for row in rows.values()]
    return {status: statuses.count(status) for status in statuses}


def _name_of(node_id: str) -> str:
    return node_id.rsplit("-", 1)[0]
