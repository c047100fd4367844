"""Workers are replaced one by one by newer ones while they work: nothing is lost, failed or done twice."""

from __future__ import annotations

import signal
import time

import pytest

from airflow_dbpartition.assignment import AssignmentStrategy, RoundRobin, Unassigned
from airflow_dbpartition.domain import JobIdentity, JobSettings, PartitionStatus
from airflow_dbpartition.launching import Job, Launcher
from tests.conftest import LONG
from tests.resilience.ledgers import HERE, STEP, Ledgers
from tests.resilience.test_restarts import verdict_over_restarts
from tests.worker.processes import CALM, Fleet, Node, wait_until
from tests.worker.processes import Job as RunningJob

RELEASES = HERE / "steps_of_releases.py"
ONCE_OR_OFTEN = range(3 if LONG else 1)
NODES = 3
WAVE, NEW_WORK = 45, 15  # partitions of a replacement, and of a release's own step: some 150 a roll


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize("executor", ["process", pytest.param("thread", marks=pytest.mark.resilience_long)])
def test_a_rolling_deploy_under_load_loses_no_attempt_and_enters_nothing_twice(
    own_fleet: Fleet, ledgers: Ledgers, executor: str, turn: int
) -> None:
    _deploy(own_fleet, ledgers, executor=executor, rolls=1)


@pytest.mark.resilience_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("executor", ["process", "thread"])
def test_five_rolling_deploys_under_load_lose_no_attempt_and_enter_nothing_twice(
    own_fleet: Fleet, ledgers: Ledgers, executor: str
) -> None:
    _deploy(own_fleet, ledgers, executor=executor, rolls=5)


def _deploy(fleet: Fleet, ledgers: Ledgers, *, executor: str, rolls: int) -> None:
    fleet.timings = CALM
    launcher = Launcher(fleet.repository, timings=CALM)
    jobs: list[RunningJob] = []
    steps_of: dict[int, int] = {}  # of the jobs whose step is new: the release that brought it

    def launch(name: str, count: int, *, step: str = STEP, strategy: AssignmentStrategy | None = None) -> RunningJob:
        plan = [
            *ledgers.plan(count // 3, transferable=True, prefix="movable", units=2, pause_s=0.1),
            *ledgers.plan(count - count // 3, transferable="until_started", prefix="once", units=2, pause_s=0.1),
        ]
        job = Job(JobIdentity(name), step, lambda _grid_size: plan, strategy=strategy or RoundRobin())
        jobs.append(RunningJob(fleet, launcher.launch(job).job_execution_id))
        return jobs[-1]

    def keep_busy(node: Node) -> None:
        """Let the node run what takes longer than an interrupted partition is given, while much else waits."""
        long = ledgers.plan(1, transferable="until_started", prefix="long", units=2, pause_s=1.3)
        pinned = fleet.submit(long, to=node.node_id, settings=JobSettings(stealing=False), step=STEP, priority=1)
        jobs.append(pinned)
        pinned.wait_for("long0", status="CLAIMED")

    running = [_start(fleet, release=0, number=number, executor=executor) for number in range(NODES)]
    for node in running:
        node.wait_until_live()
    left: list[Node] = []
    begun = time.monotonic()
    for release in range(1, rolls + 1):
        for number in range(NODES):
            leaving = running.pop(0)
            wave = launch(f"release {release}, replacement {number}", WAVE)
            keep_busy(leaving)
            assert wave.counts()["PENDING"] > 0
            leaving.send(signal.SIGTERM)
            running.append(_start(fleet, release=release, number=number, executor=executor))
            running[-1].wait_until_live()
            assert leaving.exits() == 0
            left.append(leaving)
            if number == 0:
                wave.ends()  # so that the old ones are idle, and would take what they do not know
                step = f"ledger of release {release}"
                steps_of[launch(step, NEW_WORK, step=step, strategy=Unassigned()).id] = release
    rolled_s = time.monotonic() - begun
    assert [job.ends() for job in jobs] == ["COMPLETED"] * len(jobs)

    verdict = ledgers.verdict([job.id for job in jobs])
    print(f"{rolls} roll(s) of {NODES} nodes in {rolled_s:.1f} s, executor {executor}: {verdict}")
    assert verdict.faults == []
    assert verdict.entered == rolls * (NODES * (WAVE + 1) + NEW_WORK)
    assert verdict.entered_again == 0
    assert {row.attempt for job in jobs for row in job.partitions().values()} == {1}
    assert {event for job in jobs for event in job.events()} <= {"reassigned", "stolen", "released"}
    for job in jobs:
        release = steps_of.get(job.id, 0)
        assert all(_release_of(str(row.assigned_node)) >= release for row in job.partitions().values())
    assert [[view.status.value for view in node.views()] for node in left] == [["REMOVED"]] * len(left)
    assert [[view.status.value for view in node.views()] for node in running] == [["ACTIVE"]] * NODES


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
def test_what_may_never_move_fails_unstarted_with_the_node_that_it_was_bound_to_and_a_restart_runs_it(
    own_fleet: Fleet, ledgers: Ledgers, turn: int
) -> None:
    own_fleet.timings = CALM
    launcher = Launcher(own_fleet.repository, timings=CALM)
    leaving, staying = [_start(own_fleet, release=0, number=number, executor="thread") for number in range(2)]
    for node in own_fleet.nodes:
        node.wait_until_live()
    plan = ledgers.plan(24, transferable=False, units=2, pause_s=0.15)
    first = RunningJob(
        own_fleet, launcher.launch(Job(JobIdentity("bound"), STEP, lambda _grid_size: plan)).job_execution_id
    )
    bound_to = {key: _name_of(str(row.assigned_node)) for key, row in first.partitions().items()}
    _wait_until_at_work(own_fleet, leaving, first)
    leaving.send(signal.SIGTERM)
    _start(own_fleet, release=1, number=0, executor="thread").wait_until_live()
    assert leaving.exits() == 0
    assert first.ends() == "FAILED"

    entered = {entry.key for entry in ledgers.outside() if entry.what == "entered"}
    for row in ledgers.partitions([first.id]):
        assert _name_of(str(row.assigned_node)) == bound_to[row.partition_key]
        if row.entry_key in entered:
            assert row.status == PartitionStatus.COMPLETED
        else:
            assert row.status == PartitionStatus.FAILED
            assert bound_to[row.partition_key] == leaving.name
            assert "left before this partition ran; not transferable" in row.exit_message
    failed = first.counts()["FAILED"]
    assert 12 > failed > 0
    assert set(first.events()) == {"failed"}

    second = RunningJob(own_fleet, launcher.restart(first.id).job_execution_id)  # nothing was lost
    assert second.ends() == "COMPLETED"
    assert second.counts() == {"COMPLETED": failed}
    verdict = verdict_over_restarts(ledgers, [first.id, second.id])
    print(f"bound to the node that left: {failed} of 24 failed unstarted; restarted: {verdict}")
    assert verdict.faults == []
    assert verdict.entered_again == 0
    assert [view.status.value for view in staying.views()] == ["ACTIVE"]


def _start(fleet: Fleet, *, release: int, number: int, executor: str) -> Node:
    return fleet.start(
        f"release{release}.{number}",
        imports=RELEASES,
        environment={"DBPARTITION_TEST_RELEASE": str(release)},
        executor=executor,
        concurrency=2,
        grace=60,
        wait=False,
    )


def _wait_until_at_work(fleet: Fleet, node: Node, job: RunningJob) -> None:
    """Until the node runs some of the job, while more of it waits than a node can run at once."""

    def at_work() -> bool:
        rows = job.partitions().values()
        waiting = [row for row in rows if row.status is PartitionStatus.PENDING]
        here = [row for row in rows if row.status is PartitionStatus.CLAIMED and row.assigned_node == node.node_id]
        return len(waiting) > NODES and bool(here)

    wait_until(at_work, f"{node.name} is at work", logs=fleet.log_paths)


def _name_of(node_id: str) -> str:
    return node_id.rsplit("-", 1)[0]


def _release_of(node_id: str) -> int:
    return int(node_id.removeprefix("release").split(".")[0])
