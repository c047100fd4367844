"""Fixtures that every test may use: a fresh database of each kind, and the job repository on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from airflow_dbpartition.repository import JobRepository
from tests.databases import NAMES, Database, NotAtHandError, Servers

# What a shell starts in the background ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = os.environ.get("DBPARTITION_RESILIENCE") == "long"
# Their Airflow takes a minute to start: one process runs all these files, and starts one.
SHARE_AN_AIRFLOW = ("tests/airflow/semantics/test_semantics.py", "tests/airflow/test_stories.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "resilience_long: too long for `make test`; DBPARTITION_RESILIENCE=long runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LONG:
        return
    skip = pytest.mark.skip(reason="takes too long: `make resilience` runs it (DBPARTITION_RESILIENCE=long)")
    for item in items:
        if "resilience_long" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile: file by file, but those that share an Airflow as if they were one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            path: str = super()._split_scope(nodeid)
            return SHARE_AN_AIRFLOW[0] if path in SHARE_AN_AIRFLOW else path

    return ByFile(config, log)


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
