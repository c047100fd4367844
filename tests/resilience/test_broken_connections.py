"""Every verb of the repository, with its connection broken at the worst moments: done once, or not at all and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import func, select

from airflow_dbpartition.domain import Counters, JobSettings
from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.recovery import Recovery
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.settlements import Completed
from airflow_dbpartition.worker.runner import COMPLETED, FAILED, run_claim
from airflow_dbpartition.worker.steps import load_steps
from tests import scenarios
from tests.databases import Database
from tests.resilience.ledgers import STEP, STEPS, Ledgers
from tests.resilience.wire import Moment, WireProxy

# Arranges; gives the words that name the transaction, and the verb; then judges.
Story = Iterator[tuple[bytes, Callable[[JobRepository], Any]]]


def plan(repository: JobRepository) -> Story:
    made = []
    yield b"batch_partitions", lambda through: made.append(scenarios.submit(through, 3, owner_token="try 1"))
    assert _count(repository, "instances") == _count(repository, "executions") == 1
    assert scenarios.statuses(repository, made[0].job_execution_id) == {"PENDING": 3}
    assert made[0].created


def restart(repository: JobRepository) -> Story:
    old = scenarios.submit(repository, 2).job_execution_id
    scenarios.add_node(repository)
    scenarios.fail_all(repository, old)
    yield b"batch_partitions", lambda through: through.executions.restart(old, place=scenarios.to_nobody)
    assert _count(repository, "executions") == 2
    assert scenarios.statuses(repository, repository.reading.latest_of_instance(old).job_execution_id) == {"PENDING": 2}


def heartbeat(repository: JobRepository) -> Story:
    scenarios.add_node(repository)
    scenarios.silence(repository, "a", 100)
    yield b"last_heartbeat", lambda through: through.nodes.heartbeat("a", current_load=1)
    (node,) = repository.nodes.all()
    assert node.heartbeat_age_s < 50


def register(repository: JobRepository) -> Story:
    yield b"batch_nodes", scenarios.add_node
    assert [node.node_id for node in repository.nodes.all()] == ["a"]


def complete(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    yield b"status='COMPLETED'", lambda through: scenarios.complete(through, taken, write=5)
    row = scenarios.partition(repository, job)
    assert (row.status, row.counters.write, row.version) == ("COMPLETED", 5, 1)
    assert scenarios.event_names(repository, job) == []


def complete_all(repository: JobRepository) -> Story:
    scenarios.add_node(repository)
    job = scenarios.submit(repository, 3).job_execution_id
    taken = scenarios.claim(repository, limit=3)
    completed = [Completed(one, Counters(write=5), {"key": one.partition_key}) for one in taken]
    lost: list[Any] = []
    yield b"status='COMPLETED'", lambda through: lost.extend(through.settlements.complete_all(completed))
    rows = [scenarios.partition(repository, job, one.partition_key) for one in taken]
    assert [(row.status, row.counters.write, row.version) for row in rows] == [("COMPLETED", 5, 1)] * 3
    assert [row.result for row in rows] == [{"key": "p0"}, {"key": "p1"}, {"key": "p2"}]
    assert lost == []


def fail(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    yield b"status='FAILED'", lambda through: through.settlements.fail(taken, message="broken", lost=True)
    row = scenarios.partition(repository, job)
    assert (row.status, row.counters.rollback, row.node_losses) == ("FAILED", 1, 1)
    assert scenarios.event_names(repository, job) == ["failed"]


def retry(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    yield b"status='PENDING'", lambda through: through.settlements.retry(taken, message="broken", delay_s=0)
    row = scenarios.partition(repository, job)
    assert (row.status, row.counters.rollback, row.attempt) == ("PENDING", 1, 1)
    assert scenarios.event_names(repository, job) == ["retried"]


def release(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    yield b"status='PENDING'", lambda through: through.settlements.release(taken, message="leaving")
    row = scenarios.partition(repository, job)
    assert (row.status, row.attempt, row.assigned_node) == ("PENDING", 0, None)
    assert scenarios.event_names(repository, job) == ["released"]


def stop(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    yield b"STOPPING", lambda through: through.executions.stop(job, reason="enough")
    assert repository.reading.execution(job).status == "STOPPING"
    repository.settlements.stop(taken)
    assert scenarios.event_names(repository, job) == ["stopped"]


def reassign(repository: JobRepository) -> Story:
    job, _ = _claimed(repository)
    scenarios.add_node(repository, "b")
    scenarios.remove(repository, "a")
    recovery = Recovery(repository, scenarios.QUICK)
    yield b"status='PENDING'", lambda through: Recovery(through, scenarios.QUICK).rehome("a", why="node a was lost")
    recovery.rehome("a", why="node a was lost")
    row = scenarios.partition(repository, job)
    assert (row.status, row.node_losses, row.version, row.assigned_node) == ("PENDING", 1, 2, "b")
    assert scenarios.event_names(repository, job) == ["lost", "reassigned"]


def finalise(repository: JobRepository) -> Story:
    job, taken = _claimed(repository)
    scenarios.complete(repository, taken)
    yield b"active_instance_id", lambda through: through.executions.finalise(job)
    execution = repository.reading.execution(job)
    assert (execution.status, execution.end_time is not None) == ("COMPLETED", True)


VERBS = (plan, restart, heartbeat, register, complete, complete_all, fail, retry, release, stop, reassign, finalise)


@pytest.fixture
def proxy(own_database: Database) -> Iterator[WireProxy]:
    with WireProxy(own_database.url) as proxy:
        yield proxy


@pytest.fixture
def through(own_database: Database, proxy: WireProxy) -> Iterator[JobRepository]:
    """The same job repository, reached through the proxy."""
    repository = JobRepository.connect(Database(own_database.name, proxy.url).config(pool_size=1))
    yield repository
    repository.close()


@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_verb_whose_connection_breaks_is_done_once(
    own_repository: JobRepository,
    through: JobRepository,
    proxy: WireProxy,
    verb: Callable[[JobRepository], Story],
    moment: Moment,
) -> None:
    story = verb(own_repository)
    words, act = next(story)
    proxy.break_at(moment, words)
    act(through)
    assert proxy.broken.is_set()
    assert next(story, None) is None


def test_a_claim_that_the_server_never_had_whole_takes_nothing(
    own_repository: JobRepository, through: JobRepository, proxy: WireProxy
) -> None:
    scenarios.add_node(own_repository)
    job = scenarios.submit(own_repository).job_execution_id
    proxy.break_at(Moment.SENDING, b"status='CLAIMED'")
    with pytest.raises(DatabaseError):  # it may have been taken, for all that is known here: not made again
        scenarios.claim(through)
    assert proxy.broken.is_set()
    assert scenarios.statuses(own_repository, job) == {"PENDING": 1}
    taken = scenarios.claim_one(through)
    assert (taken.attempt, taken.version) == (1, 1)


@pytest.mark.parametrize("moment", [Moment.RUNNING, Moment.COMMITTED], ids=lambda moment: moment.value)
def test_a_claim_that_nobody_heard_of_is_found_by_the_heartbeat_and_given_back(
    own_repository: JobRepository, through: JobRepository, proxy: WireProxy, moment: Moment
) -> None:
    scenarios.add_node(own_repository)
    job = scenarios.submit(own_repository).job_execution_id
    proxy.break_at(moment, b"status='CLAIMED'")
    with pytest.raises(DatabaseError):
        scenarios.claim(through)
    assert proxy.broken.is_set()

    held = through.nodes.heartbeat("a", current_load=0).held
    assert list(held.values()) == [1]
    for step_execution_id, version in held.items():
        proxy.break_at(Moment.COMMITTED, b"status='PENDING'")
        through.settlements.release_unheld(node_id="a", step_execution_id=step_execution_id, version=version)
    assert proxy.broken.is_set()
    assert scenarios.event_names(own_repository, job) == ["released"]
    assert scenarios.claim_one(through).attempt == 1


@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
def test_a_users_transaction_whose_connection_breaks_goes_on_exactly_where_the_database_stands(
    own_repository: JobRepository, through: JobRepository, proxy: WireProxy, ledgers: Ledgers, moment: Moment
) -> None:
    load_steps((str(STEPS),))
    scenarios.add_node(own_repository, steps=(STEP,))
    patient = JobSettings(partition_retries=1)
    job = scenarios.submit(
        own_repository, ledgers.plan(1, transferable=True, units=3), step=STEP, settings=patient
    ).job_execution_id
    taken = scenarios.claim_one(own_repository, steps=(STEP,))
    proxy.break_at(moment, b'"units":2')
    outcome = run_claim(taken, through, lambda: False)
    assert proxy.broken.is_set()
    assert outcome.kind == FAILED
    through.settlements.retry(taken, message=outcome.message, delay_s=0)

    again = scenarios.claim_one(own_repository, steps=(STEP,))
    assert again.checkpoint == {"units": 2 if moment is Moment.COMMITTED else 1}
    outcome = run_claim(again, through, lambda: False)
    assert outcome.kind == COMPLETED
    through.settlements.complete(again, counters=outcome.counters, result=outcome.result)
    assert ledgers.verdict([job]).faults == []
    assert outcome.counters.write == 3


def test_the_same_job_submitted_while_every_commit_is_unheard_is_one_execution(
    own_repository: JobRepository, through: JobRepository, proxy: WireProxy
) -> None:
    for _ in range(3):
        proxy.break_at(Moment.COMMITTED, b"")
        scenarios.submit(through, 2)
    assert _count(own_repository, "executions") == 1
    assert _count(own_repository, "partitions") == 2


def _claimed(repository: JobRepository) -> tuple[int, Any]:
    scenarios.add_node(repository)
    settings = JobSettings(transferable="always")
    job = scenarios.submit(repository, settings=settings).job_execution_id
    return job, scenarios.claim_one(repository)


def _count(repository: JobRepository, table: str) -> int:
    with repository.engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(getattr(repository.tables, table))).scalar_one())
