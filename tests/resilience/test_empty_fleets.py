"""Nobody is there to do the work: all nodes drain, all are frozen while a task waits for the end, nobody ever comes."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from sqlalchemy import text

from airflow_dbpartition import polled_waits, polling, waiting
from airflow_dbpartition.config import Timings
from airflow_dbpartition.demo.processes import send_signal
from airflow_dbpartition.domain import NodeStatus
from airflow_dbpartition.launching import Launcher
from airflow_dbpartition.polling import SharedPoller
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.waiting import Outcome
from tests.conftest import LONG
from tests.databases import Database
from tests.resilience.chaos import let_time_pass
from tests.resilience.ledgers import HERE, STEP, STEPS, Ledgers
from tests.resilience.test_restarts import verdict_over_restarts
from tests.worker.processes import CALM, QUICK, Fleet, Job, Node, wait_until

FIRST_CODE = HERE / "steps_of_first_code.py"
ONCE_OR_OFTEN = range(3 if LONG else 1)
FENCE_MARGIN_S = 0.5
TIMINGS = Timings(
    heartbeat_s=0.3,
    unreachable_after_s=1.0,
    remove_after_s=5.0,
    sweep_s=0.3,
    poll_s=0.2,
    steal_after_s=0.3,
    fence_margin_s=FENCE_MARGIN_S,
)
PATIENCE_S = 60.0


class Wait:
    """A task's wait for the end of an execution, in a thread, and what it writes to its log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.looks: Callable[[], int] = lambda: 0
        self._future: Future[Any] = Future()

    def begin(self, body: Callable[[], Any]) -> Wait:
        def run() -> None:
            try:
                self._future.set_result(body())
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._future.set_exception(error)

        threading.Thread(target=run, name="wait", daemon=True).start()
        return self

    def say(self, message: object, *words: object) -> None:
        self.said.append(str(message) % words if words else str(message))

    def looks_again(self, times: int) -> None:
        """Wait until it has asked the database so many times more."""
        before = self.looks()
        wait_until(lambda: self.looks() >= before + times, f"the wait has looked {times} times more")

    @property
    def is_over(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        """Wait for its end; returns what the wait returned, or raises what it raised."""
        return self._future.result(timeout=PATIENCE_S)


class Waits:
    """Begins waits of both kinds: as a "sensor" does in its own process, and as a "trigger" does for it."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self._database = database
        self._monkeypatch = monkeypatch
        # The poller of a triggerer has time; these tests have none.
        monkeypatch.setattr(polling, "SWEEP_EVERY_S", 0.3)
        monkeypatch.setattr(polling, "NODES_EVERY_S", 0.3)
        monkeypatch.setattr(polled_waits, "LOG_PROGRESS_EVERY_S", 0.0)

    def of(self, kind: str, job_execution_id: int, *, no_nodes_timeout_s: float = 1800.0) -> Wait:
        """Begin to wait for an execution."""
        begin = self._sensor if kind == "sensor" else self._trigger
        return begin(job_execution_id, no_nodes_timeout_s)

    def _sensor(self, job_execution_id: int, no_nodes_timeout_s: float) -> Wait:
        if importlib.util.find_spec("airflow") is None:
            pytest.skip("Airflow is not installed here")
        import tests.airflow.conftest  # noqa: F401 - gives Airflow a home that is no user's
        from airflow_dbpartition.sensors import PartitionCompletionSensor
        from tests.airflow.worlds import Try, connection_to, define

        timings = {name: value for name, value in asdict(TIMINGS).items() if value is not None}
        define(self._monkeypatch, "repo", connection_to(self._database, **timings))
        sensor = PartitionCompletionSensor(
            task_id="wait",
            job_execution_id=job_execution_id,
            repository_conn_id="repo",
            poke_interval=0.2,
            no_nodes_timeout=no_nodes_timeout_s,
            deferrable=False,
        )
        wait, look = Wait(), waiting.look
        looks: list[float] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            looks.append(time.monotonic())
            return look(*args, **kwargs)

        self._monkeypatch.setattr(waiting, "look", counted)
        wait.looks = lambda: len(looks)
        for level in ("info", "warning", "error"):
            self._monkeypatch.setattr(sensor.log, level, wait.say)
        return wait.begin(lambda: sensor.execute(Try().context()))

    def _trigger(self, job_execution_id: int, no_nodes_timeout_s: float) -> Wait:
        def opened() -> JobRepository:
            return JobRepository.connect(self._database.config(pool_size=1))

        async def connect() -> tuple[Callable[[], JobRepository], Timings]:
            return opened, TIMINGS

        wait, poller = Wait(), SharedPoller(connect)
        wait.looks = lambda: poller.ticks

        async def follow() -> Any:
            async for update in poller.watch(
                job_execution_id, poll_interval_s=0.2, no_nodes_timeout_s=no_nodes_timeout_s
            ):
                wait.say(update.message)
                if update.outcome is not None:
                    return update
            raise AssertionError("the poller ended without an outcome")

        return wait.begin(lambda: asyncio.run(_bounded(follow())))


async def _bounded(awaited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaited, PATIENCE_S)


@pytest.fixture
def waits(own_database: Database, monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(own_database, monkeypatch)


# --- all nodes drain ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.resilience_long)])
def test_when_all_nodes_drain_what_waits_is_kept_for_the_next_node(
    own_fleet: Fleet, ledgers: Ledgers, executor: str, turn: int
) -> None:
    own_fleet.timings = CALM
    for number in range(2):
        own_fleet.start(f"draining{number}", imports=FIRST_CODE, executor=executor, concurrency=2, wait=False)
    nodes = [node.wait_until_live().node_id for node in own_fleet.nodes]
    gate = own_fleet.directory / "gate"
    busy = own_fleet.submit(
        ledgers.plan(4, transferable="until_started", prefix="busy", held="after", gate=str(gate)), step=STEP
    )
    _wait_for_entries(own_fleet, ledgers, "held", 4)
    dealt = {f"p{number}": nodes[number % 2] for number in range(10)}
    movable, once, bound = (
        own_fleet.submit(ledgers.plan(10, transferable=policy), to=dealt, step=STEP)  # type: ignore[arg-type]
        for policy in (True, "until_started", False)
    )
    anybodys = own_fleet.submit(ledgers.plan(10, transferable=False), step=STEP)

    for node_id in nodes:
        assert own_fleet.repository.nodes.drain(node_id)
    for node in own_fleet.nodes:
        node.says("draining")
    assert {node.status for node in own_fleet.repository.nodes.all()} == {NodeStatus.DRAINING}
    assert busy.counts() == {"CLAIMED": 4}
    gate.touch()
    assert [node.exits() for node in own_fleet.nodes] == [0, 0]
    assert busy.ends() == "COMPLETED"
    for job in (movable, once, anybodys):
        assert job.counts() == {"PENDING": 10}
        assert job.column("assigned_node") == [None] * 10
    assert bound.ends() == "FAILED"  # it was planned for nodes that have left, and may never move
    assert all("left before this partition ran; not transferable" in said for said in bound.column("exit_message"))

    own_fleet.start("next", imports=STEPS, executor=executor, concurrency=2)
    assert [job.ends() for job in (movable, once, anybodys)] == ["COMPLETED"] * 3
    again = Job(own_fleet, Launcher(own_fleet.repository, timings=CALM).restart(bound.id).job_execution_id)
    assert again.ends() == "COMPLETED"
    verdict = verdict_over_restarts(ledgers, [job.id for job in (busy, movable, once, anybodys, bound, again)])
    print(f"all drained, executor {executor}: {verdict}")
    assert verdict.faults == []
    assert (verdict.entered, verdict.entered_again) == (44, 0)


# --- all nodes are frozen ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    """What a fleet of two is frozen in the middle of.

    Args:
        once: two partitions that run and may not run again.
        movable: twelve that may, and two of these run; the wait is for them.
        unstarted: ten that nobody has begun; they may not move afterwards.
    """

    once: Job
    movable: Job
    unstarted: Job
    wait: Wait


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize("kind", ["sensor", pytest.param("trigger", marks=pytest.mark.resilience_long)])
def test_while_all_nodes_are_unreachable_the_wait_goes_on_and_nothing_is_lost(
    own_fleet: Fleet, ledgers: Ledgers, waits: Waits, kind: str, turn: int
) -> None:
    frozen = _freeze_all(own_fleet, ledgers, waits, kind)
    said, looks = list(frozen.wait.said), frozen.wait.looks()
    _wait_until_all_are(own_fleet, NodeStatus.UNREACHABLE)  # nobody but the wait can have said so
    assert frozen.wait.looks() > looks + 1
    assert frozen.wait.said == said
    _thaw(own_fleet)
    _wait_until_all_are(own_fleet, NodeStatus.ACTIVE)
    (own_fleet.directory / "gate").touch()

    _assert_completed(frozen.wait, kind, partitions=12)
    jobs = [frozen.once, frozen.movable, frozen.unstarted]
    assert [job.ends() for job in jobs] == ["COMPLETED"] * 3
    verdict = ledgers.verdict([job.id for job in jobs])
    print(f"all unreachable, {kind}: {frozen.wait.looks()} looks, {len(frozen.wait.said)} lines; {verdict}")
    assert verdict.faults == []
    assert (verdict.entered, verdict.entered_again) == (24, 0)
    assert [job.events() for job in jobs] == [[], [], []]
    _assert_says_nothing_twice(frozen.wait)


@pytest.mark.resilience_long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
@pytest.mark.parametrize("kind", ["sensor", "trigger"])
def test_when_all_nodes_are_frozen_until_they_are_removed_the_wait_keeps_their_work_for_their_next_lives(
    own_fleet: Fleet, ledgers: Ledgers, waits: Waits, kind: str, turn: int
) -> None:
    frozen = _freeze_all(own_fleet, ledgers, waits, kind)
    wait_until(lambda: not own_fleet.repository.nodes.all(), "the wait has removed them all")
    frozen.movable.wait_for_counts(PENDING=12)
    assert frozen.movable.column("assigned_node") == [None] * 12
    assert frozen.unstarted.counts() == {"PENDING": 10}
    assert frozen.once.ends() == "FAILED"
    assert all("was lost while this partition ran on it" in said for said in frozen.once.column("exit_message"))
    said = len(frozen.wait.said)
    frozen.wait.looks_again(10)
    assert all("0/12 partitions done, 12 waiting" in line for line in frozen.wait.said[said:])
    assert not frozen.wait.is_over
    _thaw(own_fleet)
    wait_until(
        lambda: len(own_fleet.repository.nodes.all()) == 2, "both have begun a new life", logs=own_fleet.log_paths
    )
    (own_fleet.directory / "gate").touch()

    _assert_completed(frozen.wait, kind, partitions=12)
    assert frozen.unstarted.ends() == "COMPLETED"
    launcher = Launcher(own_fleet.repository, timings=TIMINGS)
    again = Job(own_fleet, launcher.restart(frozen.once.id, include_lost=True).job_execution_id)
    assert again.ends() == "COMPLETED"
    verdict = verdict_over_restarts(ledgers, [frozen.movable.id, frozen.unstarted.id, frozen.once.id, again.id])
    print(f"all removed, {kind}: {frozen.wait.looks()} looks, {len(frozen.wait.said)} lines; {verdict}")
    assert verdict.faults == []
    assert (verdict.entered, verdict.entered_again) == (24 + 4, 4)
    _assert_says_nothing_twice(frozen.wait)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
def test_a_node_that_is_frozen_at_any_moment_of_its_heartbeats_is_removed_like_any_other(
    own_fleet: Fleet, ledgers: Ledgers, turn: int
) -> None:
    often = replace(QUICK, heartbeat_s=0.05)  # so that some are met in the middle
    frozen = own_fleet.start("frozen", imports=FIRST_CODE, executor="thread", timings=often)
    held = ledgers.plan(
        1, transferable=True, units=2, held="between", gate=str(own_fleet.directory / "gate"), pause_s=0.1
    )
    job = own_fleet.submit(held, to=frozen.node_id, step=STEP)
    _wait_for_entries(own_fleet, ledgers, "held", 1)
    _freeze_at_its_heartbeats(own_fleet, frozen)
    assert frozen.views()[0].status is NodeStatus.ACTIVE
    own_fleet.start("heir", imports=STEPS, executor="thread")

    assert job.ends(timeout_s=30) == "COMPLETED"
    assert job.events() == ["lost", "reassigned"]
    assert [view.status for view in frozen.views()] == [NodeStatus.REMOVED]
    verdict = ledgers.verdict([job.id])
    print(f"frozen at its heartbeats: {verdict}")
    assert verdict.faults == []


# --- nobody comes ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turn", ONCE_OR_OFTEN)
def test_a_wait_for_nodes_that_never_come_ends_with_its_error_and_leaves_the_work_for_those_that_do(
    own_fleet: Fleet, ledgers: Ledgers, waits: Waits, turn: int
) -> None:
    job = own_fleet.submit(ledgers.plan(10, transferable=False), step=STEP)
    begun = time.monotonic()
    sensor = waits.of("sensor", job.id, no_nodes_timeout_s=2.0)
    trigger = waits.of("trigger", job.id, no_nodes_timeout_s=2.0)
    error = (
        f"job execution {job.id}: 0/10 partitions done, 10 waiting; no live node of group 'default' with the step "
        "'ledger' for 2 s: start workers (`dbpartition worker --node-group default …`). The partitions wait for them"
    )
    with pytest.raises(Exception, match=re.escape(error)) as raised:
        sensor.result()
    assert type(raised.value).__name__ == "AirflowException"  # which Airflow retries
    update = trigger.result()
    waited_s = time.monotonic() - begun
    assert update.outcome is Outcome.NO_NODES
    assert error.endswith(update.message)
    assert 2.0 <= waited_s < 10.0
    assert job.counts() == {"PENDING": 10}
    assert job.execution().status.is_active

    retried = waits.of("sensor", job.id)
    own_fleet.start("late", imports=STEPS, executor="thread", concurrency=2)
    _assert_completed(retried, "sensor", partitions=10)
    verdict = ledgers.verdict([job.id])
    print(f"nobody came: both waits ended after {waited_s:.1f} s; {verdict}")
    assert verdict.faults == []
    assert (verdict.entered, verdict.entered_again) == (10, 0)


# --- doing and looking -------------------------------------------------------------------------------------------


def _freeze_all(fleet: Fleet, ledgers: Ledgers, waits: Waits, kind: str) -> Frozen:
    """Freeze every process of both nodes, with somebody waiting who has been there for long enough to judge them."""
    fleet.timings = TIMINGS
    held: dict[str, Any] = {"held": "between", "gate": str(fleet.directory / "gate")}
    once = fleet.submit(ledgers.plan(2, transferable="until_started", units=3, **held), step=STEP)
    movable = fleet.submit(
        ledgers.plan(2, transferable=True, prefix="held", units=3, **held)
        + ledgers.plan(10, transferable=True, units=3),
        step=STEP,
    )
    unstarted = fleet.submit(ledgers.plan(10, transferable="until_started", units=3), step=STEP)
    wait = waits.of(kind, movable.id)
    may_judge_at = time.monotonic() + TIMINGS.remove_after_s
    for number in range(2):
        fleet.start(f"n{number}", imports=FIRST_CODE, concurrency=2, fence_margin=FENCE_MARGIN_S, wait=False)
    for node in fleet.nodes:
        node.wait_until_live()
    _wait_for_entries(fleet, ledgers, "held", 4)
    wait.looks_again(3)  # it has said by then what it found in the first or second of them
    let_time_pass(may_judge_at - time.monotonic())
    assert not wait.is_over
    for node in fleet.nodes:
        _send_to_all_of(node, signal.SIGSTOP)
    assert once.counts() == {"CLAIMED": 2}
    assert movable.counts() == {"CLAIMED": 2, "PENDING": 10}
    assert unstarted.counts() == {"PENDING": 10}
    return Frozen(once, movable, unstarted, wait)


def _thaw(fleet: Fleet) -> None:
    for node in fleet.nodes:
        _send_to_all_of(node, signal.SIGCONT)


def _send_to_all_of(node: Node, signal_number: int) -> None:
    for pid in node.process.members():
        send_signal(pid, signal_number)


def _freeze_at_its_heartbeats(fleet: Fleet, node: Node) -> None:
    """Freeze the only node again and again: its row is never locked for longer than a statement takes."""
    holding = text(
        "SELECT a.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.datname = current_database() "
        "AND a.application_name = 'dbpartition heartbeat' "
        "AND l.relation = 'batch_nodes'::regclass AND l.mode = 'RowExclusiveLock'"
    )

    def is_holding() -> bool:
        with fleet.repository.engine.connect() as connection:
            return connection.execute(holding).first() is not None

    for last in [False] * 19 + [True]:
        _send_to_all_of(node, signal.SIGSTOP)
        wait_until(lambda: not is_holding(), "a frozen node holds no lock")
        if not last:
            _send_to_all_of(node, signal.SIGCONT)
            let_time_pass(0.02)


def _wait_until_all_are(fleet: Fleet, status: NodeStatus) -> None:
    wait_until(
        lambda: [view.status for view in fleet.repository.nodes.all(include_removed=True)] == [status] * 2,
        f"both nodes are {status}",
        logs=fleet.log_paths,
    )


def _wait_for_entries(fleet: Fleet, ledgers: Ledgers, what: str, count: int) -> None:
    wait_until(
        lambda: [entry.what for entry in ledgers.outside()].count(what) >= count,
        f"{count} x {what!r} in the ledger outside",
        logs=fleet.log_paths,
    )


def _assert_completed(wait: Wait, kind: str, *, partitions: int) -> None:
    """The sensor returns the summary; the trigger fires, and leaves it to the task to ask again."""
    result = wait.result()
    if kind == "sensor":
        assert result["partitions"]["completed"] == result["partitions"]["total"] == partitions
    else:
        assert result.outcome is Outcome.COMPLETED


def _assert_says_nothing_twice(wait: Wait) -> None:
    assert [line for line, before in zip(wait.said[1:], wait.said, strict=False) if line == before] == []
