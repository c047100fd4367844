"""What a step is given: transactions with the fence, checkpoints, counters, pages by key; on every database."""

from __future__ import annotations

import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import JSON, Column, Date, DateTime, MetaData, Numeric, String, Table, Uuid, insert, select
from sqlalchemy.types import TypeEngine

from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.errors import ClaimLostError, ConfigurationError, StepInterruptedError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.worker import PartitionContext
from tests.scenarios import (
    OFTEN,
    add_node,
    claim_one,
    partition,
    plan,
    remove,
    submit,
    sweep,
    to_nobody,
)
from tests.worker.contexts import Flights, claimed_context, context_of

ALWAYS = JobSettings(transferable="always", partition_retries=5)


@pytest.fixture
def repository(repository: JobRepository) -> JobRepository:
    add_node(repository)
    return repository


# --- transactions ----------------------------------------------------------------------------------------------


def test_a_transaction_commits_writes_checkpoint_and_counters_together(repository: JobRepository) -> None:
    flights, job = Flights(repository), submit(repository)
    ctx = claimed_context(repository)
    with ctx.transaction() as connection:
        flights.write(connection, 1)
        ctx.checkpoint["at"] = 1
        ctx.counters.write += 1

    row = partition(repository, job.job_execution_id)
    assert flights.written_ids() == [1]
    assert row.checkpoint == {"at": 1}
    assert (row.counters.write, row.counters.commit, row.counters.rollback) == (1, 1, 0)


def test_a_transaction_that_fails_leaves_nothing_of_it(repository: JobRepository) -> None:
    flights, job = Flights(repository), submit(repository)
    ctx = claimed_context(repository)
    ctx.checkpoint({"at": 0})

    def fail_at_the_end() -> None:
        with ctx.transaction() as connection:
            flights.write(connection, 1)
            ctx.checkpoint["at"] = 1
            ctx.counters.write += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_the_end()
    assert flights.written() == []
    assert (dict(ctx.checkpoint), ctx.counters.write) == ({"at": 0}, 0)
    assert partition(repository, job.job_execution_id).checkpoint == {"at": 0}
    with ctx.transaction() as connection:
        flights.write(connection, 2)
    counters = partition(repository, job.job_execution_id).counters
    assert (counters.write, counters.commit, counters.rollback) == (0, 1, 1)


def test_a_zombie_commits_nothing_and_the_new_owner_does_it_once(repository: JobRepository) -> None:
    flights, job = Flights(repository), submit(repository, settings=OFTEN)
    add_node(repository, "b")
    zombie = claimed_context(repository, "a")
    remove(repository, "a")
    sweep(repository)
    owner = claimed_context(repository, "b")

    for ctx in (owner, zombie):
        if ctx is zombie:
            with pytest.raises(ClaimLostError), ctx.transaction() as connection:
                flights.write(connection, 1, by="zombie")
        else:
            with ctx.transaction() as connection:
                flights.write(connection, 1, by="owner")
                ctx.checkpoint["by"] = "owner"
    assert flights.written() == [(1, "owner")]
    assert partition(repository, job.job_execution_id).checkpoint == {"by": "owner"}


def test_an_older_claim_of_the_same_node_commits_nothing(repository: JobRepository) -> None:
    flights = Flights(repository)
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    zombie = context_of(first, repository)
    repository.settlements.release(first, message="given back")
    owner = claimed_context(repository)

    with pytest.raises(ClaimLostError), zombie.transaction() as connection:
        flights.write(connection, 1, by="zombie")
    with owner.transaction() as connection:
        flights.write(connection, 1, by="owner")
    assert flights.written() == [(1, "owner")]


def test_a_zombie_saves_no_checkpoint(repository: JobRepository) -> None:
    job = submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    zombie = context_of(first, repository)
    repository.settlements.release(first, message="given back")
    claimed_context(repository).checkpoint({"by": "owner"})

    with pytest.raises(ClaimLostError):
        zombie.checkpoint({"by": "zombie"})
    assert partition(repository, job.job_execution_id).checkpoint == {"by": "owner"}


def test_a_transaction_inside_another_is_refused_and_the_outer_one_may_go_on(repository: JobRepository) -> None:
    flights = Flights(repository)
    submit(repository)
    ctx = claimed_context(repository)
    with ctx.transaction() as connection:
        flights.write(connection, 1)
        with pytest.raises(ConfigurationError, match="open already"), ctx.transaction():
            pass
    assert flights.written_ids() == [1]


@pytest.mark.parametrize("value", [object(), float("nan"), "nul \x00"])
def test_a_checkpoint_that_cannot_be_stored_rolls_its_transaction_back(repository: JobRepository, value: Any) -> None:
    flights, job = Flights(repository), submit(repository)
    ctx = claimed_context(repository)

    def store() -> None:
        with ctx.transaction() as connection:
            flights.write(connection, 1)
            ctx.checkpoint["at"] = value

    with pytest.raises(ValueError, match=r"checkpoint\['at'\]"):
        store()
    assert flights.written() == []
    assert ctx.checkpoint == {}
    assert partition(repository, job.job_execution_id).checkpoint is None


# --- checkpoints and identity ----------------------------------------------------------------------------------


def test_the_next_attempt_begins_where_the_last_one_stood(repository: JobRepository) -> None:
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    ctx = context_of(first, repository)
    with ctx.transaction():
        ctx.checkpoint["page"] = 3
        ctx.counters.read += 30
    repository.settlements.retry(first, message="broken", delay_s=0)

    again = claimed_context(repository)
    assert again.attempt == 2
    assert again.checkpoint == {"page": 3}
    assert (again.counters.read, again.counters.commit) == (30, 1)


def test_a_restart_begins_where_the_failed_execution_stood(repository: JobRepository) -> None:
    job = submit(repository)
    first = claim_one(repository)
    context_of(first, repository).checkpoint({"page": 3})
    repository.settlements.fail(first, message="broken")
    repository.executions.finalise(job.job_execution_id)
    repository.executions.restart(job.job_execution_id, place=to_nobody)

    assert claimed_context(repository).checkpoint == {"page": 3}


def test_the_idempotency_key_is_stable_over_attempts_and_restarts(repository: JobRepository) -> None:
    job = submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    key = context_of(first, repository).idempotency_key
    repository.settlements.retry(first, message="broken", delay_s=0)
    second = claim_one(repository)
    repository.settlements.fail(second, message="broken")
    repository.executions.finalise(job.job_execution_id)
    restarted = repository.executions.restart(job.job_execution_id, place=to_nobody)

    third = claimed_context(repository)
    assert third.job_execution_id == restarted.job_execution_id != job.job_execution_id
    assert {key, context_of(second, repository).idempotency_key, third.idempotency_key} == {key}


def test_the_idempotency_key_differs_for_everything_else(repository: JobRepository) -> None:
    submit(repository, 2)
    submit(repository, 2, job="another")
    submit(repository, 2, parameters={"day": 1})
    keys = {claimed_context(repository).idempotency_key for _ in range(6)}
    assert len(keys) == 6


def test_a_step_sees_who_and_what_it_is(repository: JobRepository) -> None:
    job = submit(repository, plan(1), job="nightly")
    ctx = claimed_context(repository)
    assert (ctx.context, ctx.partition_key, ctx.step_name, ctx.job_name, ctx.job_execution_id, ctx.node_id) == (
        {"number": 0},
        "p0",
        "work",
        "nightly",
        job.job_execution_id,
        "a",
    )


def test_a_step_that_is_asked_to_stop_hears_it(repository: JobRepository) -> None:
    submit(repository)
    taken = claim_one(repository)
    assert not context_of(taken, repository).should_stop
    ctx = context_of(taken, repository, stopping=True)
    assert ctx.should_stop
    with pytest.raises(StepInterruptedError, match="'p0' was asked to stop"):
        ctx.raise_if_stopping()


# --- pages by key ----------------------------------------------------------------------------------------------


def test_pages_come_in_the_order_of_the_key_whatever_the_rows_order(repository: JobRepository) -> None:
    flights = Flights(repository, [5, 1, 4, 2, 3])
    submit(repository)
    ctx = claimed_context(repository)

    query = select(flights.source)
    pages = [[row.id for row in page] for page in ctx.read_keyset(query, key=flights.source.c.id, size=2)]
    assert pages == [[1, 2], [3, 4], [5]]
    assert ctx.counters.read == 5


def test_each_page_is_committed_with_its_position_and_read_again_only_where_it_was_not(
    repository: JobRepository,
) -> None:
    flights = Flights(repository, range(1, 8))
    job = submit(repository, settings=ALWAYS)
    query, key = select(flights.source), flights.source.c.id

    def copy(ctx: PartitionContext, by: str, bad: int | None) -> None:
        for page in ctx.read_keyset(query, key=key, size=2):
            with ctx.transaction() as connection:
                for row in page:
                    flights.write(connection, row.id, by=by)
                    ctx.counters.write += 1
                if bad in [row.id for row in page]:
                    raise ZeroDivisionError

    first = claim_one(repository)
    with pytest.raises(ZeroDivisionError):
        copy(context_of(first, repository), "first", 6)
    assert flights.written_ids() == [1, 2, 3, 4]
    repository.settlements.retry(first, message="broken", delay_s=0)

    copy(claimed_context(repository), "second", None)
    assert flights.written() == [(n, "first") for n in range(1, 5)] + [(n, "second") for n in range(5, 8)]
    counters = partition(repository, job.job_execution_id).counters
    assert (counters.write, counters.commit) == (7, 4)


def test_a_page_without_a_transaction_is_saved_when_the_next_is_asked_for(repository: JobRepository) -> None:
    flights = Flights(repository, range(1, 6))
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    pages = context_of(first, repository).read_keyset(select(flights.source), key=flights.source.c.id, size=2)
    for _ in range(2):
        next(pages)
    repository.settlements.retry(first, message="broken", delay_s=0)

    again = claimed_context(repository)
    rest = [row.id for page in again.read_keyset(select(flights.source), key=flights.source.c.id) for row in page]
    assert rest == [3, 4, 5]  # the second page was given out, but nobody has said that it was done


def test_a_second_transaction_for_one_page_is_refused_and_the_page_is_read_again(repository: JobRepository) -> None:
    flights = Flights(repository, range(1, 6))
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    ctx = context_of(first, repository)
    pages = ctx.read_keyset(select(flights.source), key=flights.source.c.id, size=2)
    next(pages)
    with ctx.transaction():
        pass
    with pytest.raises(ConfigurationError, match="was given a second"), ctx.transaction():
        pass
    repository.settlements.retry(first, message="broken", delay_s=0)

    again = claimed_context(repository)
    (row, *_) = next(again.read_keyset(select(flights.source), key=flights.source.c.id, size=2))
    assert row.id == 1


def test_a_step_that_survives_a_rolled_back_page_goes_on_with_the_next(repository: JobRepository) -> None:
    flights = Flights(repository, range(1, 7))
    job = submit(repository)
    ctx = claimed_context(repository)
    seen = []
    for page in ctx.read_keyset(select(flights.source), key=flights.source.c.id, size=2):
        seen.append(page[0].id)
        with pytest.raises(KeyError), ctx.transaction():
            raise KeyError
    assert seen == [1, 3, 5]
    assert partition(repository, job.job_execution_id).checkpoint == {"keyset": 6}


def test_rows_without_a_key_are_not_read_and_an_empty_query_has_no_page(repository: JobRepository) -> None:
    flights = Flights(repository, [2, 1])
    submit(repository)
    with repository.engine.begin() as connection:
        connection.execute(insert(flights.source), [{"id": None, "carrier": "none"}])
    ctx = claimed_context(repository)
    key = flights.source.c.id
    assert [row.id for page in ctx.read_keyset(select(key), key=key, name="one") for row in page] == [1, 2]
    assert list(ctx.read_keyset(select(key).where(key > 9), key=key, name="two")) == []


def test_two_queries_of_a_step_keep_their_positions_apart(repository: JobRepository) -> None:
    flights = Flights(repository, [1, 2])
    submit(repository)
    ctx = claimed_context(repository)
    key = flights.source.c.id
    for name in ("one", "two"):
        assert sum(len(page) for page in ctx.read_keyset(select(key), key=key, name=name)) == 2
    assert ctx.checkpoint == {"one": 2, "two": 2}


def test_two_queries_are_not_read_at_the_same_time(repository: JobRepository) -> None:
    flights = Flights(repository, [1, 2, 3])
    job = submit(repository)
    ctx = claimed_context(repository)
    key = flights.source.c.id

    def read_one_inside_the_other() -> None:
        for _outer in ctx.read_keyset(select(key), key=key, size=2, name="outer"):
            for _inner in ctx.read_keyset(select(key), key=key, size=2, name="inner"):
                with ctx.transaction():
                    pass

    with pytest.raises(ConfigurationError, match="'inner' is read while a page of 'outer' is open"):
        read_one_inside_the_other()
    assert partition(repository, job.job_execution_id).checkpoint is None  # or the outer page would count as done
    assert [len(page) for page in ctx.read_keyset(select(key), key=key, name="inner")] == [3]


def test_a_query_that_is_given_up_does_not_stand_in_the_way_of_the_next(repository: JobRepository) -> None:
    flights = Flights(repository, [1, 2, 3])
    submit(repository)
    ctx = claimed_context(repository)
    key = flights.source.c.id
    for _page in ctx.read_keyset(select(key), key=key, size=2, name="one"):
        break
    assert [len(page) for page in ctx.read_keyset(select(key), key=key, name="two")] == [3]


@pytest.mark.parametrize("how", ["saved", "replaced"])
def test_a_checkpoint_saved_in_the_middle_of_a_page_does_not_say_that_the_page_is_done(
    repository: JobRepository, how: str
) -> None:
    flights = Flights(repository, range(1, 6))
    job = submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    ctx = context_of(first, repository)
    key = flights.source.c.id
    pages = ctx.read_keyset(select(key), key=key, size=2)
    next(pages)
    with ctx.transaction():
        pass
    next(pages)
    if how == "saved":
        ctx.checkpoint["note"] = "half of it"
        ctx.checkpoint.save()
    else:
        ctx.checkpoint({"note": "half of it"})
    assert partition(repository, job.job_execution_id).checkpoint == {"keyset": 2, "note": "half of it"}
    repository.settlements.retry(first, message="broken", delay_s=0)

    again = claimed_context(repository)
    rest = [row.id for page in again.read_keyset(select(key), key=key, size=2) for row in page]
    assert rest == [3, 4, 5]


def test_a_checkpoint_replaced_in_the_transaction_of_a_page_keeps_its_position(repository: JobRepository) -> None:
    flights = Flights(repository, range(1, 4))
    job = submit(repository)
    ctx = claimed_context(repository)
    key = flights.source.c.id
    for page in ctx.read_keyset(select(key), key=key, size=2):
        with ctx.transaction():
            ctx.checkpoint({"rows": len(page)})
    assert partition(repository, job.job_execution_id).checkpoint == {"keyset": 3, "rows": 1}


def test_reading_ends_between_two_pages_when_the_step_is_asked_to_stop(repository: JobRepository) -> None:
    flights = Flights(repository, [1, 2, 3])
    submit(repository)
    asked: list[bool] = []
    taken = claim_one(repository)
    ctx = PartitionContext(taken, repository, lambda: bool(asked))
    seen = []

    def read() -> None:
        for page in ctx.read_keyset(select(flights.source), key=flights.source.c.id, size=1):
            with ctx.transaction():
                seen.append(page[0].id)
            asked.append(True)

    with pytest.raises(StepInterruptedError):
        read()
    assert seen == [1]
    assert ctx.checkpoint == {"keyset": 1}


@pytest.mark.parametrize("size", [0, -1, True, 2.5])
def test_a_page_size_that_is_none_is_refused(repository: JobRepository, size: Any) -> None:
    flights = Flights(repository, [1])
    submit(repository)
    ctx = claimed_context(repository)
    with pytest.raises(ConfigurationError, match=f"expected read_keyset size .* got {size!r}"):
        next(ctx.read_keyset(select(flights.source), key=flights.source.c.id, size=size))


def test_a_query_that_does_not_select_its_key_is_refused(repository: JobRepository) -> None:
    flights = Flights(repository, [1])
    submit(repository)
    ctx = claimed_context(repository)
    with pytest.raises(ConfigurationError, match="must select its key"):
        next(ctx.read_keyset(select(flights.source.c.carrier), key=flights.source.c.id))


_NOON = datetime(2013, 1, 1, 12)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (String(20), ["a", "b", "c"]),
        (Date(), [date(2013, 1, day) for day in (1, 2, 3)]),
        (Numeric(20, 4), [Decimal("1.0001"), Decimal("1.0002"), Decimal("12345678901234.5")]),
        (Uuid(), sorted((uuid.UUID(int=number) for number in (1, 2, 3)), key=str)),
    ],
    ids=["text", "date", "decimal", "uuid"],
)
@pytest.mark.filterwarnings("ignore:Dialect sqlite:sqlalchemy.exc.SAWarning")
def test_a_key_of_another_type_goes_through_the_checkpoint_and_back(
    repository: JobRepository, kind: TypeEngine[Any], values: list[Any]
) -> None:
    read_in_two_attempts(repository, kind, values)


def test_a_timestamp_as_key_goes_through_the_checkpoint_and_back(repository: JobRepository) -> None:
    is_postgres = repository.engine.dialect.name == "postgresql"
    zone = timezone(timedelta(hours=2)) if is_postgres else None
    values = [_NOON.replace(tzinfo=zone) + timedelta(seconds=number) for number in range(3)]
    read_in_two_attempts(repository, DateTime(timezone=is_postgres), values)


def read_in_two_attempts(repository: JobRepository, kind: TypeEngine[Any], values: list[Any]) -> None:
    """Read one page, lose the attempt, and read the rest by what the checkpoint says."""
    table = Table("keyed", MetaData(schema=repository.schema), Column("key", kind, primary_key=True))
    table.create(repository.engine)
    with repository.engine.begin() as connection:
        connection.execute(insert(table), [{"key": value} for value in values])
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    ctx = context_of(first, repository)
    (row,) = next(ctx.read_keyset(select(table), key=table.c.key, size=1))
    with ctx.transaction():
        pass
    assert row.key == values[0]
    repository.settlements.retry(first, message="broken", delay_s=0)

    again = claimed_context(repository)
    rest = [row.key for page in again.read_keyset(select(table), key=table.c.key, size=1) for row in page]
    assert rest == values[1:]


def test_a_key_that_json_cannot_keep_is_refused(repository: JobRepository) -> None:
    table = Table("odd", MetaData(schema=repository.schema), Column("key", JSON))
    table.create(repository.engine)
    submit(repository)
    ctx = claimed_context(repository)
    with repository.engine.begin() as connection:
        connection.execute(insert(table).values(key=[1]))
    if repository.engine.dialect.name == "postgresql":
        pytest.skip("PostgreSQL does not order by JSON at all")
    with pytest.raises(ConfigurationError, match="cannot read by key"):
        next(ctx.read_keyset(select(table), key=table.c.key))
