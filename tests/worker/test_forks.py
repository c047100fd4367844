"""A step that forks: its copies read, and neither write as the partition nor touch what its process has open."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from sqlalchemy import text

from airflow_dbpartition.repository import JobRepository
from tests.scenarios import add_node, partition, submit
from tests.worker.contexts import Flights, claimed_context

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def repository(repository: JobRepository) -> JobRepository:
    add_node(repository)
    return repository


class Copy:
    """A forked copy of this process that does `work`, says how that ended, and is gone."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._hears, says = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                said = repr(work())
            except BaseException as error:  # noqa: BLE001 - what a copy raised in pytest would run pytest twice
                said = f"{type(error).__name__}: {error}"
            os.write(says, said.encode())
            os._exit(0)
        os.close(says)

    def ends(self) -> str:
        """Wait for it, and return what it said."""
        with os.fdopen(self._hears, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(self._pid, 0)
        return said


def test_a_copy_is_refused_a_transaction_and_a_checkpoint(repository: JobRepository) -> None:
    flights, job = Flights(repository), submit(repository)
    ctx = claimed_context(repository)

    def write() -> None:
        with ctx.transaction() as connection:
            flights.write(connection, 2)

    with ctx.transaction() as connection:
        flights.write(connection, 1)
    for refused in (Copy(write), Copy(lambda: ctx.checkpoint({"at": "copy"}))):
        said = refused.ends()
        assert said.startswith("ConfigurationError: process ")
        assert f"is a forked copy of process {os.getpid()}, which runs partition 'p0'" in said
    write()

    assert flights.written_ids() == [1, 2]
    row = partition(repository, job.job_execution_id)
    assert (row.checkpoint, row.counters.commit) == ({}, 2)


def test_a_copy_made_inside_a_transaction_neither_commits_it_nor_ends_it(repository: JobRepository) -> None:
    if repository.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection to cut off: a file that is open in two processes is beyond our help")
    flights, _job = Flights(repository), submit(repository)
    ctx = claimed_context(repository)
    copies = []
    with ctx.transaction() as connection:
        flights.write(connection, 1)
        copies.append(Copy(lambda: flights.write(connection, 2)))
        copies.append(Copy(connection.commit))
        copies.append(Copy(connection.close))
        said = [copy.ends() for copy in copies]
        flights.write(connection, 3)
        assert flights.written_ids() == []

    assert flights.written_ids() == [1, 3]
    assert "OperationalError" in said[0]


def test_copies_read_on_connections_of_their_own_all_at_once(repository: JobRepository) -> None:
    submit(repository)
    ctx = claimed_context(repository)

    def read(number: int) -> list[int]:
        answers = set()
        for _ in range(50):
            with ctx.engine.connect() as connection:
                answers.add(connection.execute(text(f"SELECT {number}")).scalar_one())
        return sorted(answers)

    read(0)  # so that there is a pooled connection to inherit
    copies = [Copy(lambda number=number: read(number)) for number in range(1, 5)]  # type: ignore[misc]
    assert read(0) == [0]
    assert [copy.ends() for copy in copies] == [f"[{number}]" for number in range(1, 5)]
    assert read(9) == [9]
