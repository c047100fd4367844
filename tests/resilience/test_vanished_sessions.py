"""A node whose session has ended is suspected at once, and nobody else is."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import Connection

from airflow_dbpartition.config import Timings
from airflow_dbpartition.domain import JobSettings, NodeStatus
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository, sessions
from tests import scenarios
from tests.resilience.chaos import let_time_pass
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.worker.processes import Fleet, wait_until

# Silence alone would take a minute to be noticed.
PATIENT = Timings(
    heartbeat_s=0.3, unreachable_after_s=60.0, remove_after_s=90.0, sweep_s=0.2, poll_s=0.2, steal_after_s=0.3
)


class Watched:
    """A repository whose nodes keep sessions of their own, and a node among them that sweeps."""

    def __init__(self, repository: JobRepository) -> None:
        self.repository = repository
        self.recovery = Recovery(repository, PATIENT)
        self.sessions: dict[str, Connection] = {}

    def connect(self, node_id: str) -> None:
        connection = self.repository.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        assert sessions.show(connection.connection.driver_connection, node_id)
        self.sessions[node_id] = connection

    def add(self, *node_ids: str) -> None:
        for node_id in node_ids:
            scenarios.add_node(self.repository, node_id)
            self.connect(node_id)

    def cut(self, node_id: str) -> None:
        """End the session, and return when the server has noticed."""
        connection = self.sessions.pop(node_id)
        connection.detach()
        connection.close()

        def is_gone() -> bool:
            presence = self.repository.sessions.present()
            return presence is None or sessions.number_of(node_id) not in presence.process_ids

        wait_until(is_gone, f"the session of {node_id} is gone")

    def sweep(self, observer: str = "watcher") -> list[str]:
        report = self.recovery.sweep(may_judge=False, observer=observer)
        return report.vanished

    def status(self, node_id: str) -> NodeStatus:
        return next(node.status for node in self.repository.nodes.all() if node.node_id == node_id)


@pytest.fixture
def watched(own_repository: JobRepository) -> Iterator[Watched]:
    watched = Watched(own_repository)
    yield watched
    for connection in watched.sessions.values():
        with contextlib.suppress(Exception):
            connection.detach()
            connection.close()


def test_a_node_whose_session_ends_is_suspected_and_a_heartbeat_saves_it(watched: Watched) -> None:
    watched.add("watcher", "a", "b")
    assert watched.sweep() == []
    watched.cut("a")
    assert watched.sweep() == ["a"]
    assert (watched.status("a"), watched.status("b")) == (NodeStatus.UNREACHABLE, NodeStatus.ACTIVE)
    watched.repository.nodes.heartbeat("a", current_load=0)
    assert watched.sweep() == []
    assert watched.status("a") is NodeStatus.ACTIVE


def test_a_node_that_has_been_heard_since_its_session_was_missed_is_not_suspected(watched: Watched) -> None:
    watched.add("watcher", "a")
    watched.sweep()
    watched.cut("a")
    presence = watched.repository.sessions.present()
    assert presence is not None
    watched.repository.nodes.heartbeat("a", current_load=0)
    assert watched.repository.losses.suspect_vanished(["a"], seen=presence.seen) == []


def test_a_node_that_has_no_session_to_be_seen_is_judged_by_its_silence_alone(watched: Watched) -> None:
    watched.add("watcher")
    scenarios.add_node(watched.repository, "behind a pooler")
    assert (watched.sweep(), watched.sweep()) == ([], [])
    assert watched.status("behind a pooler") is NodeStatus.ACTIVE


def test_who_has_lost_its_own_session_or_has_none_suspects_nobody(watched: Watched) -> None:
    watched.add("watcher", "a", "b")
    watched.sweep()
    for node_id in ("watcher", "a"):  # as when the server restarts
        watched.cut(node_id)
    watched.connect("watcher")
    assert watched.sweep() == []
    watched.cut("b")
    assert watched.sweep() == ["b"], "from here on it has seen"
    assert watched.sweep(observer="unseen") == []


def test_a_session_that_is_lent_by_a_pooler_shows_nothing(own_repository: JobRepository) -> None:
    class Lent:
        """What the client was told when it connected is not the session that answers."""

        def __init__(self, connection: object) -> None:
            self._connection = connection
            self.info = type("info", (), {"backend_pid": 1})

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    with own_repository.engine.connect() as connection:
        assert not sessions.show(Lent(connection.connection.driver_connection), "a")
    assert own_repository.sessions.present() is None


def test_a_killed_worker_is_suspected_within_two_seconds_and_its_work_is_not_taken(
    own_fleet: Fleet, ledgers: Ledgers
) -> None:
    own_fleet.timings = PATIENT
    dead, *living = [own_fleet.start(f"n{number}", imports=STEPS) for number in range(3)]
    job = own_fleet.submit(
        ledgers.plan(1, transferable=True, units=1, pause_s=60.0),
        to=dead.node_id,
        settings=JobSettings(stealing=False),
        step=STEP,
    )
    job.wait_for(status="CLAIMED")
    let_time_pass(1.0)  # the others sweep some times, and see the session
    killed_at = time.monotonic()
    dead.send(signal.SIGKILL)
    wait_until(lambda: dead.views()[0].status is NodeStatus.UNREACHABLE, "it is suspected", logs=own_fleet.log_paths)
    assert time.monotonic() - killed_at < 2.0
    let_time_pass(1.0)
    assert job.partition("p0").status.value == "CLAIMED", "a suspicion takes nothing away"
    assert [view.status.value for node in living for view in node.views()] == ["ACTIVE", "ACTIVE"]
