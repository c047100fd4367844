"""Workers among timeouts, with no connection to be had, and with a saboteur: nothing is lost, nothing is done twice."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard, SessionProcess
from airflow_dbpartition.domain import JobSettings, NodeStatus, Partition, PartitionStatus
from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database, run_sql, with_user
from tests.resilience.contention import locked
from tests.resilience.hurried_worker import NAME, PATIENT
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.resilience.steps_of_contention import SLOTS
from tests.worker.processes import CALM, Fleet, Node
from tests.worker.processes import HERE as WORKERS
from tests.worker.processes import STEPS as WORKER_STEPS

GREEDY_STEPS = Path(__file__).with_name("steps_of_contention.py")
MANY = 50
OFTEN = JobSettings(partition_retries=1000, retry_delay_s=0.05, retry_max_delay_s=0.1)


# --- timeouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fresh_database",
    ["postgresql", *(pytest.param(name, marks=pytest.mark.resilience_long) for name in ("mysql", "sqlite"))],
    indirect=True,
)
def test_a_worker_whose_statements_time_out_writes_every_outcome_once_when_the_table_is_let_go(
    database: Database, repository: JobRepository, tmp_path: Path, guard: Guard
) -> None:
    with Fleet(database, repository, tmp_path, guard, PATIENT) as fleet:
        node = _start_hurried(fleet, guard)
        job, gate = fleet.gated(3, transferable=False, to=node.node_id)
        fleet.wait_for_note("begun", times=2)
        with locked(database, "batch_partitions"):
            gate.touch()
            fleet.wait_for_note("ended", times=2)
            node.says("settle not written yet", times=2)
            if database.name != "mysql":  # there one settle takes so long that no claim is thought of
                node.says("claiming failed")
            if database.name == "postgresql":
                node.says("heartbeat failed", times=2)
                node.says("canceling statement due to statement timeout", times=5)
        assert job.ends() == "COMPLETED"
        assert sorted(note.partition_key for note in fleet.notes("ended")) == ["p0", "p1", "p2"]
        assert job.column("attempt") == job.column("version") == [1, 1, 1]
        assert job.events() == []
        assert [view.status for view in repository.nodes.all(include_removed=True)] == [NodeStatus.ACTIVE]


def _start_hurried(fleet: Fleet, guard: Guard) -> Node:
    database = fleet.database
    lock_timeout_s = 0.1 if database.name == "sqlite" else 1.0  # PostgreSQL: the statement's own timeout comes first
    words = [database.url, database.schema or "", str(WORKER_STEPS), str(lock_timeout_s)]
    process = SessionProcess(
        [sys.executable, "-m", "tests.resilience.hurried_worker", *words],
        log_path=fleet.directory / f"{NAME}.log",
        environment=dict(os.environ),
        cwd=WORKERS.parent.parent,
    )
    guard.add(process)
    node = Node(NAME, process, fleet)
    fleet.nodes.append(node)
    return node.wait_until_live()


# --- connections -----------------------------------------------------------------------------------------------


class Guest:
    """A user of a database on PostgreSQL for whom there is only so much room."""

    def __init__(self, database: Database) -> None:
        self.name = f"guest_{secrets.token_hex(4)}"
        self._owner = database
        self.url = with_user(database, self.name).url
        user = make_url(database.url).username
        run_sql(database, f"CREATE ROLE {self.name} LOGIN IN ROLE {user}")

    def has_room_for(self, connections: int) -> None:
        run_sql(self._owner, f"ALTER ROLE {self.name} CONNECTION LIMIT {connections}")

    def is_turned_out(self) -> None:
        """Every session that it has is ended."""
        run_sql(self._owner, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{self.name}'")


@pytest.fixture
def guest(own_database: Database) -> Guest:
    return Guest(own_database)


def test_a_worker_that_gets_no_connection_at_its_start_says_so_in_one_line_and_ends(
    own_fleet: Fleet, guest: Guest
) -> None:
    guest.has_room_for(0)
    node = own_fleet.start(url=guest.url, wait=False)
    assert node.exits() == 1
    (said,) = node.log.strip().splitlines()
    assert said.startswith(f"error: database postgresql+psycopg2://{guest.name}@")
    assert said.endswith(f'FATAL: too many connections for role "{guest.name}"')
    assert node.views() == []


@pytest.mark.resilience_long
def test_a_worker_that_comes_to_a_full_server_says_so_in_one_line_and_ends(tmp_path: Path, guard: Guard) -> None:
    with EmbeddedPostgres(settings={"max_connections": "8", "fsync": "off"}) as server:
        database = Database("postgresql", server.create_database("jobs"))
        repository = database.migrated()
        with Fleet(database, repository, tmp_path, guard, CALM) as fleet, contextlib.ExitStack() as crowd:
            with contextlib.suppress(OperationalError):
                while True:
                    crowd.enter_context(create_engine(database.url, poolclass=NullPool).connect())
            node = fleet.start(wait=False)
            assert node.exits() == 1
            (said,) = node.log.strip().splitlines()
            assert said.startswith("error: database postgresql+psycopg2://")
            assert said.endswith("FATAL: sorry, too many clients already")

            with pytest.raises(DatabaseError, match="too many clients already"), repository.engine.connect():
                repository.executions.finalise(1)  # its only connection is lent
            crowd.close()
            fleet.start("later")
            assert fleet.submit().ends() == "COMPLETED"
        repository.close()


@pytest.mark.resilience_long
def test_a_worker_that_gets_one_connection_only_goes_on_when_there_are_more(own_fleet: Fleet, guest: Guest) -> None:
    guest.has_room_for(1)
    node = own_fleet.start(url=guest.url, timings=CALM, wait=False)
    node.says("heartbeat failed", times=2)
    guest.has_room_for(MANY)
    node.says("heartbeat is answered again")
    assert own_fleet.submit(2).ends() == "COMPLETED"
    assert len(node.views()) == 1


def test_a_step_that_gets_no_connection_fails_and_says_why_or_is_retried_until_there_is_one(
    own_fleet: Fleet, ledgers: Ledgers, guest: Guest
) -> None:
    node = own_fleet.start(url=guest.url, imports=STEPS, timings=CALM)
    guest.has_room_for(2)  # the worker's own
    once = own_fleet.submit(ledgers.plan(1, transferable=False), step=STEP)
    assert once.ends() == "FAILED"
    assert f'FATAL:  too many connections for role "{guest.name}"' in (once.partition().exit_message or "")

    often = own_fleet.submit(ledgers.plan(2, transferable=True, units=2), step=STEP, settings=OFTEN)
    node.says("partition retried", times=3)
    guest.has_room_for(MANY)
    assert often.ends() == "COMPLETED"
    assert ledgers.verdict([once.id, often.id]).faults == []


def test_a_worker_that_loses_its_connections_and_gets_no_others_for_a_while_writes_every_outcome_once(
    own_fleet: Fleet, guest: Guest
) -> None:
    node = own_fleet.start(url=guest.url, timings=CALM, concurrency=2)
    job, gate = own_fleet.gated(4, transferable=False, to=node.node_id)
    own_fleet.wait_for_note("begun", times=2)
    guest.has_room_for(0)
    guest.is_turned_out()
    gate.touch()
    own_fleet.wait_for_note("ended", times=2)
    node.says("settle not written yet", times=4)
    node.says("heartbeat failed", times=2)
    node.says("claiming failed")
    node.says("too many connections for role", times=6)
    guest.has_room_for(MANY)
    assert job.ends() == "COMPLETED"
    assert sorted(note.partition_key for note in own_fleet.notes("ended")) == ["p0", "p1", "p2", "p3"]
    assert job.column("attempt") == job.column("version") == [1, 1, 1, 1]
    assert job.events() == []
    assert [view.status for view in node.views()] == [NodeStatus.ACTIVE]


@pytest.mark.parametrize(
    "fresh_database", ["postgresql", pytest.param("mysql", marks=pytest.mark.resilience_long)], indirect=True
)
def test_a_step_whose_connection_ends_between_two_of_its_transactions_goes_on(
    database: Database, repository: JobRepository, tmp_path: Path, guard: Guard
) -> None:
    with Fleet(database, repository, tmp_path, guard) as fleet:
        fleet.start()
        job, gate = fleet.gated(do="count", transferable=False)
        fleet.wait_for_note("committed-3")
        _end_every_session(database)
        gate.touch()
        assert job.ends() == "COMPLETED"
        row = job.partition()
        assert (row.result, row.attempt, row.counters.write, row.counters.commit) == (6, 1, 6, 6)


def _end_every_session(database: Database) -> None:
    """Of the workers and of the test."""
    engine = database.plain_engine()
    with engine.connect() as connection:
        if database.name == "postgresql":
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        else:
            others = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            for number in connection.exec_driver_sql(others).scalars().all():
                connection.exec_driver_sql(f"KILL CONNECTION {number}")
    engine.dispose()


def test_threads_that_each_want_a_second_connection_all_get_one(own_fleet: Fleet) -> None:
    own_fleet.start(imports=GREEDY_STEPS, executor="thread", concurrency=SLOTS, timings=CALM)
    job = own_fleet.submit(_greedy(more=1), step="greedy")
    assert job.ends(timeout_s=20) == "COMPLETED"


@pytest.mark.resilience_long
def test_threads_that_have_taken_all_connections_and_want_more_fail_and_say_why_and_the_worker_goes_on(
    own_fleet: Fleet,
) -> None:
    node = own_fleet.start(imports=GREEDY_STEPS, executor="thread", concurrency=SLOTS, timings=CALM)
    job = own_fleet.submit(_greedy(more=2), step="greedy")
    assert job.ends(timeout_s=90) == "FAILED"
    said = [row.exit_message or "" for row in job.partitions().values() if row.status == PartitionStatus.FAILED]
    assert said
    assert all("QueuePool limit of size 8 overflow 5 reached, connection timed out" in message for message in said)
    print(f"{len(said)} of {SLOTS} greedy partitions failed: {said[0].splitlines()[-1]}")

    later = own_fleet.submit([Partition("p0", {"together": False, "more": 2})], step="greedy")
    assert later.ends() == "COMPLETED"
    assert [view.status for view in node.views()] == [NodeStatus.ACTIVE]
    assert "heartbeat failed" not in node.log


def _greedy(*, more: int) -> list[Partition]:
    return [Partition(f"p{number}", {"together": True, "more": more}) for number in range(SLOTS)]
