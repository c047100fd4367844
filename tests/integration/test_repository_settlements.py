"""Settling: only whoever still holds a claim may, saying it twice does no harm, and nothing lands twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select

from airflow_dbpartition.domain import (
    LIVE_PARTITIONS,
    Claim,
    Counters,
    JobSettings,
    Partition,
    PartitionStatus,
    Transition,
    Transitions,
)
from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.moves import move
from tests.scenarios import (
    OFTEN,
    add_node,
    claim,
    claim_one,
    column,
    complete,
    event_names,
    partition,
    remove,
    statuses,
    submit,
    sweep,
)

Settle = Callable[[JobRepository, Claim], None]

SETTLES: dict[str, Settle] = {
    "complete": lambda repository, taken: complete(repository, taken),
    "fail": lambda repository, taken: repository.settlements.fail(taken, message="broken"),
    "stop": lambda repository, taken: repository.settlements.stop(taken),
    "retry": lambda repository, taken: repository.settlements.retry(taken, message="again", delay_s=0),
    "release": lambda repository, taken: repository.settlements.release(taken, message="leaving"),
}
settles = pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)


def test_completing_stores_the_result_and_the_counters(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    taken = claim_one(repository)
    result = {"rows": 7, "names": ["ü", None], "nested": {"x": [1.5]}}
    repository.settlements.complete(taken, counters=Counters(7, 6, 5, 4, 3, 2), result=result)
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.result, row.counters) == (PartitionStatus.COMPLETED, result, Counters(7, 6, 5, 4, 3, 2))
    assert column(repository, launched.job_execution_id, "end_time") != [None]
    assert event_names(repository, launched.job_execution_id) == [], "the happy path writes no event"


@pytest.mark.parametrize("result", [None, 0, False, "", [], {}], ids=repr)
def test_small_results_come_back_as_they_went(repository: JobRepository, result: object) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    complete(repository, claim_one(repository), result=result)
    got = partition(repository, launched.job_execution_id).result
    assert got == result
    assert type(got) is type(result)


@settles
def test_saying_it_twice_is_accepted_and_written_once(repository: JobRepository, settle: Settle) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=OFTEN)
    taken = claim_one(repository)
    settle(repository, taken)
    before = repository.reading.partitions(launched.job_execution_id)
    events = event_names(repository, launched.job_execution_id)
    settle(repository, taken)
    assert repository.reading.partitions(launched.job_execution_id) == before
    assert event_names(repository, launched.job_execution_id) == events


@pytest.mark.parametrize(
    ("first", "settle"),
    [pytest.param(SETTLES[first], SETTLES[then], id=f"{first}-{then}") for first, then in permutations(SETTLES, 2)],
)
def test_what_is_settled_cannot_be_settled_otherwise(repository: JobRepository, first: Settle, settle: Settle) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=OFTEN)
    taken = claim_one(repository)
    first(repository, taken)
    before = repository.reading.partitions(launched.job_execution_id)
    both_pending = {first, settle} == {SETTLES["retry"], SETTLES["release"]}
    if both_pending:
        settle(repository, taken)
    else:
        with pytest.raises(ClaimLostError, match="no longer held by a"):
            settle(repository, taken)
    assert repository.reading.partitions(launched.job_execution_id) == before


@settles
def test_the_claim_of_another_node_cannot_be_settled(repository: JobRepository, settle: Settle) -> None:
    add_node(repository)
    add_node(repository, "b")
    launched = submit(repository, 1)
    taken = claim_one(repository)
    forged = Claim(**{**taken.__dict__, "node_id": "b"})
    with pytest.raises(ClaimLostError):
        settle(repository, forged)
    assert partition(repository, launched.job_execution_id).status is PartitionStatus.CLAIMED


@settles
def test_an_old_claim_of_the_same_node_cannot_settle_its_new_one(repository: JobRepository, settle: Settle) -> None:
    """A → B → A: the row is claimed by A again, and only the version tells the two apart."""
    for node in "ab":
        add_node(repository, node)
    launched = submit(repository, 1, settings=OFTEN, to="a")
    zombie = claim_one(repository, "a")
    remove(repository, "a")
    sweep(repository)
    claim_one(repository, "b")
    with repository.engine.begin() as connection:
        connection.execute(repository.tables.nodes.delete().where(repository.tables.nodes.c.node_id == "a"))
    add_node(repository, "a")
    remove(repository, "b")
    sweep(repository)
    current = claim_one(repository, "a")
    assert current.version > zombie.version
    with pytest.raises(ClaimLostError):
        settle(repository, zombie)
    assert statuses(repository, launched.job_execution_id) == {"CLAIMED": 1}
    complete(repository, current)
    with pytest.raises(ClaimLostError):
        complete(repository, zombie)


def test_a_retry_keeps_its_node_its_attempts_and_its_transferability(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=JobSettings(partition_retries=2))
    first = claim_one(repository)
    repository.settlements.retry(first, message="Traceback\nboom", delay_s=0)
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.assigned_node, row.attempt) == (PartitionStatus.PENDING, "a", 1)
    assert row.exit_message == "Traceback\nboom"
    assert row.counters.rollback == 1
    assert column(repository, launched.job_execution_id, "is_transferable") == [0]
    again = claim_one(repository)
    assert (again.attempt, again.version, again.retries_left) == (2, 2, 1)
    complete(repository, again)
    assert partition(repository, launched.job_execution_id).exit_message is None


@pytest.mark.parametrize("delay_s", [0, 0.00001, 0.5, 1e-7, 86400.25])
def test_a_retry_waits_as_long_as_it_is_told(repository: JobRepository, delay_s: float) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    repository.settlements.retry(claim_one(repository), message="again", delay_s=delay_s)
    (available,) = column(repository, launched.job_execution_id, "available_at")
    (updated,) = column(repository, launched.job_execution_id, "last_updated")
    assert (available - updated).total_seconds() == pytest.approx(delay_s, abs=0.05)
    assert bool(claim(repository)) == (delay_s < 0.1)


def test_a_release_gives_the_attempt_back_and_lets_anybody_have_what_may_move(repository: JobRepository) -> None:
    add_node(repository)
    add_node(repository, "b")
    launched = submit(repository, [Partition("p0"), Partition("fixed", transferable=False)], to="a")
    for taken in claim(repository, "a", 2):
        repository.settlements.release(taken, message="leaving")
    rows = repository.reading.partitions(launched.job_execution_id)
    assert [(row.status, row.attempt) for row in rows] == [(PartitionStatus.PENDING, 0)] * 2
    assert [row.assigned_node for row in rows] == [None, "a"], "what may never move stays"
    assert column(repository, launched.job_execution_id, "is_transferable") == [1, 0]
    assert event_names(repository, launched.job_execution_id) == ["released", "released"]
    assert claim_one(repository, "b").attempt == 1


def test_a_failure_is_stored_without_the_passwords_that_it_quotes(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1, settings=JobSettings(partition_retries=1))
    repository.settlements.retry(claim_one(repository), message="no postgresql://me:hunter2@db/x", delay_s=0)
    repository.settlements.fail(claim_one(repository), message="no mysql://me:hunter2@db/x")
    row = partition(repository, launched.job_execution_id)
    assert row.exit_message == "no mysql://me:***@db/x"
    told = [event.message or "" for event in repository.reading.events(launched.job_execution_id)]
    assert len(told) == 2
    assert not any("hunter2" in text for text in told)


def test_a_claim_whose_answer_was_lost_is_given_back(repository: JobRepository) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    taken = claim_one(repository)
    held = repository.nodes.heartbeat("a", current_load=0).held
    assert held == {taken.step_execution_id: taken.version}
    repository.settlements.release_unheld(
        node_id="a", step_execution_id=taken.step_execution_id, version=held[taken.step_execution_id]
    )
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.attempt) == (PartitionStatus.PENDING, 0)
    again = claim_one(repository)
    with pytest.raises(ClaimLostError):
        repository.settlements.release_unheld(
            node_id="a", step_execution_id=taken.step_execution_id, version=taken.version
        )
    complete(repository, again)


@pytest.mark.parametrize("message", ["a\x00b", "\ud800 lone", "x" * 1_000_000, "", "%s %(x)s :name"], ids=len)
def test_a_failure_never_fails_to_be_recorded(repository: JobRepository, message: str) -> None:
    add_node(repository)
    launched = submit(repository, 1)
    repository.settlements.fail(claim_one(repository), message=message)
    row = partition(repository, launched.job_execution_id)
    assert row.status is PartitionStatus.FAILED
    assert len(row.exit_message or "") <= 8000
    assert event_names(repository, launched.job_execution_id) == ["failed"]
    repository.executions.finalise(launched.job_execution_id)


# --- checkpoints in a user's own transaction ---------------------------------------------------------------------

effects = Table("effects", MetaData(), Column("number", Integer))


def read_effects(repository: JobRepository) -> list[int]:
    with repository.engine.connect() as connection:
        return list(connection.execute(select(effects.c.number)).scalars())


def write_with_fence(repository: JobRepository, taken: Claim, number: int) -> None:
    with repository.engine.begin() as connection:
        connection.execute(insert(effects).values(number=number))
        repository.settlements.checkpoint(
            connection, taken, checkpoint={"last": number}, counters=Counters(write=number)
        )


@pytest.fixture
def effects_table(repository: JobRepository) -> JobRepository:
    effects.drop(repository.engine, checkfirst=True)
    effects.create(repository.engine)
    return repository


def test_effects_checkpoint_and_counters_are_committed_together(effects_table: JobRepository) -> None:
    repository = effects_table
    add_node(repository)
    launched = submit(repository, 1, settings=JobSettings(partition_retries=1))
    taken = claim_one(repository)
    write_with_fence(repository, taken, 5)
    row = partition(repository, launched.job_execution_id)
    assert (row.checkpoint, row.counters.write) == ({"last": 5}, 5)
    assert read_effects(repository) == [5]
    repository.settlements.retry(taken, message="again", delay_s=0)
    again = claim_one(repository)
    assert (again.checkpoint, again.counters.write) == ({"last": 5}, 5)


def test_a_zombies_transaction_rolls_back_whole(effects_table: JobRepository) -> None:
    repository = effects_table
    for node in "ab":
        add_node(repository, node)
    launched = submit(repository, 1, settings=OFTEN, to="a")
    zombie = claim_one(repository, "a")
    remove(repository, "a")
    sweep(repository)
    current = claim_one(repository, "b")
    with pytest.raises(ClaimLostError):
        write_with_fence(repository, zombie, 1)
    write_with_fence(repository, current, 2)
    assert read_effects(repository) == [2]
    assert partition(repository, launched.job_execution_id).checkpoint == {"last": 2}
    complete(repository, current)
    with pytest.raises(ClaimLostError):
        write_with_fence(repository, current, 3)
    assert read_effects(repository) == [2]


def test_an_open_user_transaction_does_not_hold_up_a_sweep(effects_table: JobRepository) -> None:
    repository = effects_table
    if repository.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    for node in "ab":
        add_node(repository, node)
    launched = submit(repository, 2, settings=OFTEN, to="a")
    held, _ = claim(repository, "a", 2)
    remove(repository, "a")
    with repository.engine.begin() as connection:
        repository.settlements.checkpoint(connection, held, checkpoint={"n": 1}, counters=Counters())
        sweep(repository)
        rows = repository.reading.partitions(launched.job_execution_id)
        assert [row.status for row in rows] == [PartitionStatus.CLAIMED, PartitionStatus.PENDING]
    sweep(repository)
    row = partition(repository, launched.job_execution_id)
    assert (row.status, row.checkpoint) == (PartitionStatus.PENDING, {"n": 1}), "what was committed in time is kept"


def test_a_status_is_written_from_exactly_the_statuses_that_the_transition_names(repository: JobRepository) -> None:
    """The one function that moves partitions, against the one table of legal moves, for every pair of the two."""
    add_node(repository)
    job_execution_id = submit(repository, 1, to="a").job_execution_id
    p = repository.tables.partitions
    transitions = [value for value in vars(Transitions).values() if isinstance(value, Transition)]
    assert len(transitions) == 11
    for transition, status in product(transitions, PartitionStatus):
        with repository.engine.begin() as connection:
            connection.execute(p.update().values(status=status.value, version=7, end_time=None))
            moved = move(connection, repository.tables, transition, p.c.job_execution_id == job_execution_id)
        row = partition(repository, job_execution_id)
        allowed = status in transition.sources
        (end_time,) = column(repository, job_execution_id, "end_time")
        assert moved == int(allowed), (transition, status)
        assert row.status is (transition.target if allowed else status), (transition, status)
        assert row.version == (8 if allowed and transition.changes_hands else 7), (transition, status)
        assert (end_time is not None) == (allowed and transition.target not in LIVE_PARTITIONS), (transition, status)
