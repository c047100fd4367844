"""Fixtures that every test may use: a fresh database of each kind, and the job repository on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import Engine

from airflow_dbpartition.repository import JobRepository
from tests.databases import NAMES, Database, NotAtHandError, Servers

# What a shell starts in the background ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("sqlite"))
    yield servers
    servers.close()


def _fresh(servers: Servers, name: str) -> Iterator[Database]:
    try:
        server = servers.get(name)
    except NotAtHandError as reason:
        pytest.skip(str(reason))
    with server.fresh() as database:
        yield database


@pytest.fixture(params=NAMES)
def fresh_database(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Database]:
    """An empty database of each kind in turn."""
    yield from _fresh(servers, request.param)


@pytest.fixture
def database(fresh_database: Database) -> Database:
    """Where this test's tables are: `.name`, `.url`, `.schema`; still empty unless `repository` is used as well."""
    return fresh_database


@pytest.fixture
def engine(fresh_database: Database) -> Iterator[Engine]:
    """A user's plain engine on an empty database of each kind."""
    engine = fresh_database.plain_engine()
    yield engine
    engine.dispose()


@pytest.fixture
def repository(fresh_database: Database) -> Iterator[JobRepository]:
    """The job repository on a database of each kind, tables made."""
    repository = fresh_database.migrated()
    yield repository
    repository.close()


@pytest.fixture
def postgres(servers: Servers) -> Iterator[Database]:
    """An empty schema on PostgreSQL, for what only PostgreSQL has."""
    yield from _fresh(servers, "postgresql")


@pytest.fixture
def postgres_repository(postgres: Database) -> Iterator[JobRepository]:
    """The job repository on PostgreSQL, tables made."""
    repository = postgres.migrated()
    yield repository
    repository.close()


@pytest.fixture
def mysql(servers: Servers) -> Iterator[Database]:
    """An empty database on MySQL or MariaDB."""
    yield from _fresh(servers, "mysql")
