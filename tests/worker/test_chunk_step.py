"""Chunk-oriented steps on every database: what is written, filtered and skipped, and where a restart begins."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select
from sqlalchemy import exc as sqlalchemy_errors

from airflow_dbpartition.domain import JobSettings
from airflow_dbpartition.errors import (
    ClaimLostError,
    ConfigurationError,
    DbPartitionError,
    StepInterruptedError,
    UnskippableError,
)
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.worker import ChunkStep, KeysetReader, PartitionContext
from tests.scenarios import add_node, claim_one, partition, submit
from tests.worker.contexts import Flights, claimed_context, context_of

ALWAYS = JobSettings(transferable="always", partition_retries=5)


class BadRow(Exception):
    """This item is bad; the world is well."""


@pytest.fixture
def repository(repository: JobRepository) -> JobRepository:
    add_node(repository)
    return repository


@pytest.fixture
def flights(repository: JobRepository) -> Flights:
    return Flights(repository)


def numbers(count: int) -> Callable[[Any], range]:
    return lambda _ctx: range(1, count + 1)


def writing_to(flights: Flights, *, bad: tuple[int, ...] = ()) -> Callable[[list[int], Any], None]:
    def write(items: list[int], connection: Any) -> None:
        for item in items:
            flights.write(connection, item)
            if item in bad:
                raise BadRow(f"cannot write {item}")

    return write


def unless(bad: set[int], error: type[Exception] = BadRow) -> Callable[[int], int]:
    def process(item: int) -> int:
        if item in bad:
            raise error(f"cannot process {item}")
        return item

    return process


class Items:
    """Items by an iterator that goes on after an error."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self._left = iter(range(1, count + 1))
        self._bad = bad

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> int:
        item = next(self._left)
        if item in self._bad:
            raise BadRow(f"cannot read {item}")
        return item


def run(repository: JobRepository, step: ChunkStep) -> dict[str, int]:
    """Run it as one job of one partition; returns what it did, which is also what the row says."""
    job = submit(repository)
    told = step(claimed_context(repository))
    assert vars(partition(repository, job.job_execution_id).counters) == told
    return {name: count for name, count in told.items() if count}


def test_every_item_is_written_in_chunks_of_one_transaction(repository: JobRepository, flights: Flights) -> None:
    step = ChunkStep(numbers(7), None, writing_to(flights), chunk_size=3)

    assert run(repository, step) == {"read": 7, "write": 7, "commit": 3}
    assert flights.written_ids() == [1, 2, 3, 4, 5, 6, 7]


def test_no_item_is_no_chunk(repository: JobRepository, flights: Flights) -> None:
    assert run(repository, ChunkStep(numbers(0), None, writing_to(flights))) == {}


def test_a_writer_may_do_without_the_connection(repository: JobRepository) -> None:
    written: list[list[int]] = []
    assert run(repository, ChunkStep(numbers(3), None, written.append, chunk_size=2))["write"] == 3
    assert written == [[1, 2], [3]]


def test_what_the_processor_answers_with_none_is_filtered(repository: JobRepository, flights: Flights) -> None:
    step = ChunkStep(numbers(6), lambda item: None if item > 2 else item * 10, writing_to(flights), chunk_size=2)

    assert run(repository, step) == {"read": 6, "write": 2, "filter": 4, "commit": 3}
    assert flights.written_ids() == [10, 20]


def test_a_bad_item_is_skipped_in_reading_processing_and_writing(repository: JobRepository, flights: Flights) -> None:
    skipped: list[tuple[Any, str]] = []
    step = ChunkStep(
        lambda _ctx: Items(9, {2}),
        unless({5}),
        writing_to(flights, bad=(8,)),
        chunk_size=3,
        skip=(BadRow,),
        on_skip=lambda item, error: skipped.append((item, str(error))),
    )

    told = run(repository, step)
    assert flights.written_ids() == [1, 3, 4, 6, 7, 9]
    assert skipped == [(None, "cannot read 2"), (5, "cannot process 5"), (8, "cannot write 8")]
    assert (told["read"], told["write"], told["skip"]) == (8, 6, 3)
    assert told["rollback"] == 2  # the chunk of the item that could not be written, and that item alone


def test_a_generator_that_cannot_go_on_after_an_error_is_not_taken_for_one_that_has_ended(
    repository: JobRepository, flights: Flights
) -> None:
    def read(_ctx: Any) -> Iterator[int]:
        yield 1
        raise BadRow("cannot read 2")
        yield 3

    with pytest.raises(UnskippableError, match="an error ends a generator"):
        run(repository, ChunkStep(read, None, writing_to(flights), skip=(BadRow,)))


def test_one_more_bad_item_than_the_limit_fails_the_partition(repository: JobRepository, flights: Flights) -> None:
    def step(bad: set[int]) -> ChunkStep:
        return ChunkStep(numbers(9), unless(bad), writing_to(flights), chunk_size=2, skip=(BadRow,), skip_limit=2)

    assert run(repository, step({1, 5}))["skip"] == 2
    with pytest.raises(UnskippableError, match=r"skip_limit = 2 .*BadRow: cannot process 7"):
        step({3, 5, 7})(context_of_new_job(repository))


def test_the_limit_counts_the_skips_of_all_attempts(repository: JobRepository, flights: Flights) -> None:
    def process(item: int, *, fatal: int, bad: int) -> int:
        return unless({fatal}, KeyError)(unless({bad})(item))

    def step(**items: int) -> ChunkStep:
        return ChunkStep(
            numbers(6),
            partial(process, **items),
            writing_to(flights),
            chunk_size=1,
            skip=(BadRow,),
            skip_limit=1,
        )

    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    with pytest.raises(KeyError):
        step(bad=2, fatal=4)(context_of(first, repository))
    repository.settlements.retry(first, message="broken", delay_s=0)

    with pytest.raises(UnskippableError, match="cannot process 5"):
        step(bad=5, fatal=0)(claimed_context(repository))
    assert flights.written_ids() == [1, 3, 4]


def test_an_error_that_is_not_skippable_fails_the_step_and_keeps_the_chunks_before(
    repository: JobRepository, flights: Flights
) -> None:
    step = ChunkStep(numbers(6), unless({5}, KeyError), writing_to(flights), chunk_size=2, skip=(BadRow,))
    with pytest.raises(KeyError):
        step(context_of_new_job(repository))
    assert flights.written_ids() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "error",
    [
        Exception,
        OSError,
        ConnectionError,
        ConnectionResetError,
        TimeoutError,
        socket.gaierror,
        MemoryError,
        ImportError,
        RuntimeError,  # RecursionError is one
        DbPartitionError,
        ClaimLostError,
        sqlalchemy_errors.SQLAlchemyError,
        sqlalchemy_errors.DBAPIError,
        sqlalchemy_errors.OperationalError,
        sqlalchemy_errors.TimeoutError,
    ],
)
def test_what_tells_of_the_infrastructure_may_not_be_skipped(error: type[Exception]) -> None:
    with pytest.raises(ConfigurationError, match=f"skip may not hold {error.__name__}"):
        ChunkStep(numbers(1), None, print, skip=(error,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reader": 5}, "expected reader to be a function or have read_from"),
        ({"writer": None}, "expected writer to be a function"),
        ({"chunk_size": 0}, "expected chunk_size to be an integer of at least 1, got 0"),
        ({"chunk_size": True}, "expected chunk_size to be an integer of at least 1, got True"),
        ({"skip_limit": -1}, "expected skip_limit to be an integer of at least 0, got -1"),
        ({"skip": (KeyboardInterrupt,)}, "expected skip to hold exception types"),
        ({"skip": ("BadRow",)}, "expected skip to hold exception types, got 'BadRow'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_step_is_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ChunkStep(**{"reader": numbers(1), "writer": print, **arguments})


def test_a_row_that_a_constraint_refuses_is_skipped_and_its_neighbours_are_written(
    repository: JobRepository,
) -> None:
    table = Table("unique_ids", MetaData(schema=repository.schema), Column("id", Integer, primary_key=True))
    table.create(repository.engine)
    with repository.engine.begin() as connection:
        connection.execute(insert(table).values(id=3))

    def write(items: list[int], connection: Any) -> None:
        connection.execute(insert(table), [{"id": item} for item in items])

    told = run(repository, ChunkStep(numbers(4), None, write, skip=(sqlalchemy_errors.IntegrityError,)))
    with repository.engine.connect() as connection:
        assert list(connection.execute(select(table.c.id).order_by(table.c.id)).scalars()) == [1, 2, 3, 4]
    assert (told["write"], told["skip"], told["rollback"]) == (3, 1, 2)


@pytest.mark.parametrize("by_key", [False, True], ids=["by count", "by key"])
def test_a_restart_begins_behind_the_last_committed_chunk(
    repository: JobRepository, flights: Flights, by_key: bool
) -> None:
    fill(repository, flights, 8)
    read: list[int] = []

    def step(bad: set[int]) -> ChunkStep:
        reader = KeysetReader(select(flights.source), key=flights.source.c.id, size=3) if by_key else numbers(8)

        def process(item: Any) -> int:
            number = item.id if by_key else item
            read.append(number)
            return unless(bad)(number)

        return ChunkStep(reader, process, writing_to(flights), chunk_size=2)

    job = submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    with pytest.raises(BadRow):
        step({6})(context_of(first, repository))
    assert flights.written_ids() == [1, 2, 3, 4]
    repository.settlements.retry(first, message="broken", delay_s=0)

    step(set())(claimed_context(repository))
    assert read == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert flights.written_ids() == list(range(1, 9))
    counters = partition(repository, job.job_execution_id).counters
    assert (counters.read, counters.write, counters.commit) == (8, 8, 4)


def test_a_restart_does_not_count_again_what_could_not_be_read(repository: JobRepository, flights: Flights) -> None:
    job = submit(repository, settings=ALWAYS)
    first = claim_one(repository)

    def step(bad: set[int]) -> ChunkStep:
        return ChunkStep(
            lambda _ctx: Items(6, {2}),
            unless(bad, KeyError),
            writing_to(flights),
            chunk_size=2,
            skip=(BadRow,),
            skip_limit=1,
        )

    with pytest.raises(KeyError):
        step({4})(context_of(first, repository))
    repository.settlements.retry(first, message="broken", delay_s=0)
    step(set())(claimed_context(repository))

    assert flights.written_ids() == [1, 3, 4, 5, 6]
    counters = partition(repository, job.job_execution_id).counters
    assert (counters.read, counters.write, counters.skip) == (5, 5, 1)


def test_a_zombie_writes_no_chunk(repository: JobRepository, flights: Flights) -> None:
    submit(repository, settings=ALWAYS)
    first = claim_one(repository)
    repository.settlements.release(first, message="given back")
    step = ChunkStep(numbers(4), None, writing_to(flights), skip=(BadRow,))
    with pytest.raises(ClaimLostError):
        step(context_of(first, repository))
    assert flights.written() == []

    step(claimed_context(repository))
    assert flights.written_ids() == [1, 2, 3, 4]


def test_a_chunk_step_that_is_asked_to_stop_ends_between_two_chunks(
    repository: JobRepository, flights: Flights
) -> None:
    submit(repository)
    asked: list[int] = []

    def write(items: list[int], connection: Any) -> None:
        writing_to(flights)(items, connection)
        asked.append(1)

    ctx = PartitionContext(claim_one(repository), repository, lambda: len(asked) >= 2)
    with pytest.raises(StepInterruptedError):
        ChunkStep(numbers(9), None, write, chunk_size=2)(ctx)
    assert flights.written_ids() == [1, 2, 3, 4]


def context_of_new_job(repository: JobRepository) -> PartitionContext:
    submit(repository, job="another")
    return claimed_context(repository)


def fill(repository: JobRepository, flights: Flights, count: int) -> None:
    with repository.engine.begin() as connection:
        connection.execute(insert(flights.source), [{"id": number} for number in range(1, count + 1)])
