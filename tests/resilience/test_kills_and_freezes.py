"""A worker, or a part of it, is killed or frozen in the middle of its work: the policies say what becomes of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from airflow_dbpartition.demo.processes import send_signal
from airflow_dbpartition.domain import JobSettings, Partition
from tests.conftest import LONG
from tests.databases import Database
from tests.resilience.chaos import let_time_pass
from tests.resilience.ledgers import STEP, STEPS, Entry, Ledgers, Row
from tests.worker.processes import QUICK, Fleet, Job, Node, is_alive, wait_until
from tests.worker.proxy import HEARTBEAT, Proxy

in_rounds = pytest.mark.parametrize("round_number", range(5 if LONG else 1))
only_at_length = pytest.mark.resilience_long
pytestmark = pytest.mark.timeout(120)

VICTIM, HEIRS = "victim", ("heir0", "heir1")
TRANSFERABLE: dict[str, bool | str] = {"movable": True, "lazy": "until_started", "fixed": False}  # a job of each
RUNNING, WAITING = 2, 3  # partitions of each job
SLOTS = RUNNING * len(TRANSFERABLE)
UNITS = 2
PLACES = ("inside", "before", "after")  # of the last unit's transaction: where running partitions are held
THREADS_OUTLIVED_THEIR_CLAIMS = 75  # exit code

Fate = tuple[str, tuple[str, ...]]  # the status of a partition, and who entered it, one after the other
# By job, what becomes of what ran and of what waited.
OF_A_LOST_NODE: dict[str, tuple[set[Fate], set[Fate]]] = {
    "movable": ({("COMPLETED", ("victim", "heir"))}, {("COMPLETED", ("heir",))}),
    "lazy": ({("FAILED", ("victim",))}, {("COMPLETED", ("heir",))}),
    "fixed": ({("FAILED", ("victim",))}, {("FAILED", ())}),
}


@dataclass
class Stage:
    """A victim that is full, with work that waits for it, of a job of each policy; and two heirs that are idle.

    Args:
        fleet: of all three.
        ledgers: written by every partition.
        round_number: says where the running partitions are held.
    """

    fleet: Fleet
    ledgers: Ledgers
    round_number: int
    jobs: dict[str, Job] = field(default_factory=dict)

    def begin(self, *, settings: dict[str, JobSettings] | None = None, **victim: Any) -> None:
        """Return when all that the victim runs is held at its gate."""
        self.fleet.start(VICTIM, imports=STEPS, concurrency=SLOTS, wait=False, **victim)
        for name in HEIRS:
            self.fleet.start(name, imports=STEPS, concurrency=2, wait=False)
        self.victim, *self.heirs = [node.wait_until_live() for node in self.fleet.nodes]
        self.victim_id = self.victim.node_id
        self.victim.send(signal.SIGSTOP)  # to find all three jobs at once
        for policy in TRANSFERABLE:
            self.jobs[policy] = self._submit(policy, (settings or {}).get(policy, JobSettings()))
        p = self.fleet.repository.tables.partitions
        with self.fleet.repository.engine.begin() as connection:
            connection.execute(update(p).where(p.c.partition_key.like("waiting%")).values(priority=-1))
        self.victim.send(signal.SIGCONT)
        self._wait_until(lambda: len(self.said("held")) == SLOTS, "the victim is full")

    def _submit(self, policy: str, settings: JobSettings) -> Job:
        kind = partial(self.ledgers.plan, transferable=TRANSFERABLE[policy], units=UNITS)
        work: list[Partition] = []
        for number in range(RUNNING):
            hold = {"unit": UNITS - 1, "where": self.place(number), "gate": str(self._gate)}
            work += [replace(running, key=f"running{number}") for running in kind(1, hold=hold)]
        work += kind(WAITING, prefix="waiting")
        return self.fleet.submit(work, to=self.victim_id, settings=replace(settings, stealing=False), step=STEP)

    def place(self, number: int) -> str:
        """Where the running partitions of this number are held."""
        return PLACES[(self.round_number + number) % len(PLACES)]

    @property
    def _gate(self) -> Path:
        return self.fleet.directory / "gate"

    # --- doing -------------------------------------------------------------------------------------------------

    def let_go(self, *names: str) -> None:
        """Open the gates of nodes."""
        for name in names:
            Path(f"{self._gate} of {name}").touch()

    def freeze(self, pids: list[int]) -> None:
        for pid in pids:
            send_signal(pid, signal.SIGSTOP)

    def thaw(self, pids: list[int]) -> None:
        for pid in pids:
            send_signal(pid, signal.SIGCONT)

    def begins_a_new_life(self) -> str:
        """Wait until the victim has come back under a new id, and return that."""
        self._wait_until(lambda: _statuses(self.victim) == ["ACTIVE", "REMOVED"], "the victim begins a new life")
        (view,) = self.victim.views(include_removed=False)
        return view.node_id

    def ends_or_begins_a_new_life(self) -> None:
        def over() -> bool:
            return self.victim.process.exit_code is not None or _statuses(self.victim) == ["ACTIVE", "REMOVED"]

        self._wait_until(over, "the victim ends or begins a new life")
        assert self.victim.process.exit_code in (None, THREADS_OUTLIVED_THEIR_CLAIMS)

    def _wait_until(self, look: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
        wait_until(look, what, timeout_s=timeout_s, logs=self.fleet.log_paths)

    def wait_for_heirs(self) -> None:
        """Wait until the heirs are in the middle of all that may be run again."""
        places = [self.place(number) for number in range(RUNNING)]
        again = len([place for place in places if place != "after"])  # there it is done but for the last words
        self._wait_until(lambda: len(self.said("held", by="heir")) == again, "the heirs are in the middle of it")

    def wait_for_refusals(self) -> None:
        """Wait until each transaction that the victim held open, or began afterwards, was refused by the fence."""
        places = [self.place(number) for _ in TRANSFERABLE for number in range(RUNNING)]
        refused = len([place for place in places if place != "after"])
        self._wait_until(lambda: len(self.said("refused", by=VICTIM)) == refused, "the fence refuses")

    def works(self, node_id: str) -> Job:
        """A job that the node has completed."""
        job = self.fleet.submit(self.ledgers.plan(1, transferable=False), to=node_id, step=STEP)
        assert job.ends(timeout_s=30) == "COMPLETED"
        return job

    # --- looking -----------------------------------------------------------------------------------------------

    def said(self, what: str, *, by: str | None = None) -> list[Entry]:
        return [entry for entry in self.ledgers.outside() if entry.what == what and by in (None, _role(entry.node_id))]

    def written_by_victim(self) -> set[tuple[str, int]]:
        """What its first life has written to the ledger in the database."""
        query = text(f"SELECT entry_key, unit FROM {self.ledgers.table} WHERE node_id = :node")
        with self.fleet.repository.engine.connect() as connection:
            return {(row[0], row[1]) for row in connection.execute(query, {"node": self.victim_id})}

    def rows(self, policy: str) -> dict[str, Row]:
        return {row.partition_key: row for row in self.ledgers.partitions([self.jobs[policy].id])}

    def pids_of(self, partition_key: str) -> list[int]:
        """Of the victim's children that hold this partition of a job."""
        keys = {self.rows(policy)[partition_key].entry_key for policy in self.jobs}
        return [entry.pid for entry in self.said("held", by=VICTIM) if entry.key in keys]

    def fate(self, row: Row) -> Fate:
        entered = tuple(_role(entry.node_id) for entry in self.said("entered") if entry.key == row.entry_key)
        return (row.status, entered)

    def fates(self) -> dict[str, tuple[set[Fate], set[Fate]]]:
        """By job, of what ran and of what waited."""
        found: dict[str, tuple[set[Fate], set[Fate]]] = {}
        for policy in self.jobs:
            found[policy] = (set(), set())
            for key, row in self.rows(policy).items():
                found[policy][key.startswith("waiting")].add(self.fate(row))
        return found

    def ends(self, *more: Job) -> None:
        """Wait for the end of all jobs; both ledgers must be right, and no heir have been lost."""
        jobs = [*self.jobs.values(), *more]
        for job in jobs:
            job.ends(timeout_s=30)
        verdict = self.ledgers.verdict([job.id for job in jobs])
        print(f"round {self.round_number}: {verdict}; {len(self.said('refused'))} refused")
        assert verdict.faults == []
        assert [_statuses(heir) for heir in self.heirs] == [["ACTIVE"], ["ACTIVE"]]

    def assert_what_becomes_of_a_lost_node(self) -> None:
        assert self.fates() == OF_A_LOST_NODE
        for policy in ("lazy", "fixed"):
            assert "while this partition ran on it; not transferable" in self.rows(policy)["running0"].exit_message
        assert "before this partition ran; not transferable" in self.rows("fixed")["waiting0"].exit_message
        assert {row.assigned_node for row in self.rows("fixed").values()} == {self.victim_id}


def _role(node_id: str) -> str:
    return node_id.rsplit("-", 1)[0].rstrip("01")


def _statuses(node: Node) -> list[str]:
    return sorted(view.status.value for view in node.views())


@pytest.fixture
def stage(own_fleet: Fleet, ledgers: Ledgers, round_number: int) -> Stage:
    return Stage(own_fleet, ledgers, round_number)


@pytest.fixture
def proxy(own_database: Database) -> Iterator[Proxy]:
    with Proxy(own_database.url) as proxy:
        yield proxy


# --- killed --------------------------------------------------------------------------------------------------------


@in_rounds
@pytest.mark.parametrize(
    ("who", "executor"),
    [
        ("supervisor", "process"),
        pytest.param("family", "process", marks=only_at_length),
        pytest.param("supervisor", "thread", marks=only_at_length),
    ],
)
def test_what_a_killed_worker_leaves_behind_is_dead_before_its_work_goes_on_elsewhere(
    stage: Stage, who: str, executor: str
) -> None:
    stage.let_go(*HEIRS)
    stage.begin(executor=executor)
    family = stage.victim.process.members()
    assert len(family) == (1 + SLOTS if executor == "process" else 1)
    for pid in family if who == "family" else [stage.victim.pid]:
        send_signal(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in family), "all of it is dead", timeout_s=10)
    assert stage.said("entered", by="heir") == []

    stage.let_go(VICTIM)  # nobody is there to go through
    stage.ends()
    stage.assert_what_becomes_of_a_lost_node()


@in_rounds
@pytest.mark.parametrize("harm", ["killed", pytest.param("frozen", marks=only_at_length)])
def test_a_child_that_is_killed_or_outlasts_its_time_frozen_costs_its_partition_one_attempt(
    stage: Stage, harm: str
) -> None:
    limited = JobSettings(partition_timeout_s=None if harm == "killed" else 1.5 * QUICK.remove_after_s)
    again = replace(limited, partition_retries=1, retry_delay_s=0.01)
    stage.begin(settings={"movable": again, "lazy": limited, "fixed": limited})
    pids = stage.pids_of("running0")
    for pid in pids:
        send_signal(pid, signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
    stage.let_go(VICTIM)
    stage.ends()

    assert not any(is_alive(pid) for pid in pids)
    for policy, job in stage.jobs.items():
        fates = {key: stage.fate(row) for key, row in stage.rows(policy).items()}
        harmed = ("COMPLETED", ("victim", "victim")) if policy == "movable" else ("FAILED", ("victim",))
        assert fates.pop("running0") == harmed, policy
        assert set(fates.values()) == {("COMPLETED", ("victim",))}, policy
        assert job.events() == ["retried" if policy == "movable" else "failed"]
    words = "killed by signal 9 SIGKILL" if harm == "killed" else "took longer than partition_timeout = 6 s"
    for policy in ("lazy", "fixed"):
        assert words in stage.rows(policy)["running0"].exit_message
    assert _statuses(stage.victim) == ["ACTIVE"]


# --- frozen --------------------------------------------------------------------------------------------------------


@only_at_length
@in_rounds
def test_a_child_that_is_frozen_alone_keeps_its_claim_and_goes_on(stage: Stage) -> None:
    stage.begin()
    pids = stage.pids_of("running0")
    stage.freeze(pids)
    stage.let_go(VICTIM)
    others = {"COMPLETED": RUNNING - 1 + WAITING, "CLAIMED": 1}
    for job in stage.jobs.values():
        job.wait_for_counts(**others)
    let_time_pass(1.5 * QUICK.remove_after_s)
    assert [job.counts() for job in stage.jobs.values()] == [others] * len(stage.jobs)

    stage.thaw(pids)
    stage.ends()
    assert [job.events() for job in stage.jobs.values()] == [[]] * len(stage.jobs)
    once = {("COMPLETED", ("victim",))}
    assert stage.fates() == dict.fromkeys(TRANSFERABLE, (once, once))
    assert _statuses(stage.victim) == ["ACTIVE"]


@only_at_length
@in_rounds
def test_children_of_a_frozen_supervisor_end_before_their_work_goes_on_elsewhere(stage: Stage) -> None:
    stage.begin()
    children = stage.victim.children()
    assert len(children) == SLOTS
    stage.freeze([stage.victim.pid])
    wait_until(lambda: stage.said("entered", by="heir"), "the heirs begin", logs=stage.fleet.log_paths)
    assert not any(is_alive(pid) for pid in children)

    before = stage.written_by_victim()
    stage.wait_for_heirs()
    stage.let_go(VICTIM)
    stage.thaw([stage.victim.pid])
    new_life = stage.begins_a_new_life()
    stage.let_go(*HEIRS)
    stage.ends(stage.works(new_life))
    stage.assert_what_becomes_of_a_lost_node()
    assert stage.written_by_victim() == before


@only_at_length
@in_rounds
@pytest.mark.parametrize("executor", ["process", "thread"])
def test_what_was_frozen_as_a_whole_writes_nothing_when_it_is_thawed(stage: Stage, executor: str) -> None:
    stage.begin(executor=executor)
    family = stage.victim.process.members()
    stage.freeze(family)
    stage.wait_for_heirs()
    before = stage.written_by_victim()
    stage.let_go(VICTIM)
    stage.thaw([pid for pid in family if pid != stage.victim.pid])
    let_time_pass(1.0)  # what the children may still do, they do
    stage.thaw([stage.victim.pid])
    if executor == "process":
        stage.begins_a_new_life()
    else:
        stage.ends_or_begins_a_new_life()
    assert stage.written_by_victim() == before

    stage.let_go(*HEIRS)
    stage.ends()
    stage.assert_what_becomes_of_a_lost_node()
    assert stage.written_by_victim() == before


@in_rounds
@pytest.mark.parametrize("executor", ["process", pytest.param("thread", marks=pytest.mark.resilience_long)])
def test_the_fence_refuses_what_a_worker_commits_whose_clock_stood_still(
    stage: Stage, proxy: Proxy, executor: str
) -> None:
    # A machine that was suspended wakes up with its monotonic clock where it was: as it sees it, it has much time.
    asleep = replace(QUICK, remove_after_s=2000)
    stage.begin(executor=executor, timings=asleep, url=proxy.url)
    family = stage.victim.process.members()
    stage.freeze(family)
    stage.wait_for_heirs()
    before = stage.written_by_victim()
    proxy.freeze(HEARTBEAT)  # nor does it hear in time that it was removed
    stage.let_go(VICTIM)
    stage.thaw(family)
    stage.wait_for_refusals()
    assert stage.written_by_victim() == before

    proxy.restore()
    new_life = stage.begins_a_new_life()
    stage.let_go(*HEIRS)
    stage.ends(stage.works(new_life))
    stage.assert_what_becomes_of_a_lost_node()
    assert stage.written_by_victim() == before


# --- frozen with locks in hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    ["heartbeat", pytest.param("claim", marks=only_at_length)],  # that one lasts as long as a statement may
)
@pytest.mark.resilience_long
def test_a_worker_frozen_in_the_middle_of_its_own_transaction_is_lost_like_any_other(
    own_fleet: Fleet, ledgers: Ledgers, statement: str
) -> None:
    victim, heir = (own_fleet.start(name, imports=STEPS, concurrency=2) for name in (VICTIM, "heir"))
    tables = own_fleet.repository.tables
    if statement == "heartbeat":
        _slow_down(own_fleet, f"UPDATE OF last_heartbeat ON {tables.nodes}", "NEW.node_id LIKE 'victim%'")
    else:
        claimed = "NEW.status = 'CLAIMED' AND NEW.assigned_node LIKE 'victim%'"
        _slow_down(own_fleet, f"UPDATE OF status ON {tables.partitions}", claimed)
    job = _submit_to(victim, own_fleet, ledgers)
    family = _frozen_when_slow(victim, own_fleet)

    assert job.ends(timeout_s=60) == "COMPLETED"
    assert {row.result["node"] for row in job.partitions().values()} == {heir.node_id}
    for pid in family:
        send_signal(pid, signal.SIGCONT)
    wait_until(lambda: _statuses(victim) == ["ACTIVE", "REMOVED"], "it begins a new life", logs=own_fleet.log_paths)
    verdict = ledgers.verdict([job.id])
    print(verdict)
    assert verdict.faults == []


@only_at_length
@in_rounds
@pytest.mark.parametrize("harm", ["thawed", "killed", "left"])
def test_a_worker_frozen_between_its_fence_and_its_commit_keeps_only_that_partition_waiting_and_not_for_long(
    own_fleet: Fleet, ledgers: Ledgers, harm: str, round_number: int
) -> None:
    victim, heir = (own_fleet.start(name, imports=STEPS, concurrency=2) for name in (VICTIM, "heir"))
    fence = "NEW.partition_key = 'p0' AND NEW.assigned_node LIKE 'victim%'"
    _slow_down(own_fleet, f"UPDATE OF checkpoint ON {own_fleet.repository.tables.partitions}", fence)
    job = _submit_to(victim, own_fleet, ledgers)
    family = _frozen_when_slow(victim, own_fleet)

    wait_until(lambda: _statuses(victim) == ["REMOVED"], "it is removed", logs=own_fleet.log_paths)
    wait_until(lambda: heir.node_id in _owners(job, "p1", "p2", "p3"), "the others move", logs=own_fleet.log_paths)
    assert _owners(job, "p0") == {victim.node_id}
    if harm != "left":  # where it stays frozen, the server ends its transaction
        for pid in family[::-1]:
            send_signal(pid, signal.SIGCONT if harm == "thawed" else signal.SIGKILL)
    assert job.ends(timeout_s=30) == "COMPLETED"
    verdict = ledgers.verdict([job.id])
    print(f"round {round_number}: {verdict}")
    assert verdict.faults == []
    # Thawed before anybody has moved it, it is still the victim's to complete; or its next life's to take.
    lives = {view.node_id for view in victim.views()} if harm == "thawed" else set()
    allowed = {heir.node_id} | lives
    assert job.partition("p0").result["node"] in allowed


def _owners(job: Job, *keys: str) -> set[str | None]:
    return {job.partition(key).assigned_node for key in keys}


def _slow_down(fleet: Fleet, event: str, condition: str) -> None:
    """Let each row that such a statement changes take its time, while its lock is held."""
    slowness = """
        CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END';
        CREATE TRIGGER be_slow AFTER {event} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION be_slow()
    """
    with fleet.repository.engine.begin() as connection:
        connection.execute(text(slowness.format(event=event, condition=condition)))


def _submit_to(node: Node, fleet: Fleet, ledgers: Ledgers) -> Job:
    """More than it can do before it is frozen."""
    work = ledgers.plan(4, transferable=True, units=UNITS, pause_s=1.0)
    return fleet.submit(work, to=node.node_id, settings=JobSettings(stealing=False), step=STEP)


def _frozen_when_slow(node: Node, fleet: Fleet) -> list[int]:
    """Freeze the worker while the server is at its statement; what is frozen."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")

    def is_slow() -> bool:
        with fleet.repository.engine.connect() as connection:
            return bool(connection.execute(query).scalar_one())

    wait_until(is_slow, "the server is at the slow statement", logs=fleet.log_paths)
    family = node.process.members()
    for pid in family:
        send_signal(pid, signal.SIGSTOP)
    return family
