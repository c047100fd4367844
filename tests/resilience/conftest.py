"""Fixtures of the resilience tests: a PostgreSQL of their own that they may kill, fleets and ledgers on it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.errors import DbPartitionError
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.resilience.ledgers import Ledgers
from tests.worker.processes import QUICK, Fleet


@pytest.fixture(scope="session")
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


@pytest.fixture(scope="session")
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server that nobody else uses, and that is durable: what is committed survives its end."""
    # A killed server keeps what it wrote (the kernel has it). With fsync on, each start after a kill syncs the whole
    # data directory first: on a slow disk that is half a minute, and measures the disk.
    server = EmbeddedPostgres(settings={"fsync": "off"})
    try:
        server.start()
    except DbPartitionError as error:
        server.close()
        pytest.skip(f"no PostgreSQL can be embedded: {str(error).splitlines()[0]}")
    yield server
    server.close()


@pytest.fixture
def own_database(own_server: EmbeddedPostgres) -> Database:
    """An empty database on it; whoever has stopped the server finds it started again here."""
    own_server.start()
    return Database("postgresql", own_server.create_database(f"test_{secrets.token_hex(4)}"))


@pytest.fixture
def own_repository(own_database: Database) -> Iterator[JobRepository]:
    repository = own_database.migrated()
    yield repository
    repository.close()


@pytest.fixture
def own_fleet(own_database: Database, own_repository: JobRepository, tmp_path: Path, guard: Guard) -> Iterator[Fleet]:
    """Workers on that database that take each other for dead within seconds."""
    with Fleet(own_database, own_repository, tmp_path, guard, QUICK) as fleet:
        yield fleet


@pytest.fixture
def ledgers(own_repository: JobRepository, tmp_path: Path) -> Ledgers:
    return Ledgers(own_repository, tmp_path)
