"""The databases at hand: what is found on this machine, and a fresh, empty one of it for each test."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import normalise_url
from airflow_dbpartition.repository import JobRepository

POSTGRES_VARIABLE = "DBPARTITION_TEST_POSTGRES_URL"
MYSQL_VARIABLE = "DBPARTITION_TEST_MYSQL_URL"
# Instead of a URL: as if no server ran on this machine.
EMBEDDED, NONE = "embedded", "none"
NAMES = ("postgresql", "mysql", "sqlite")


class NotAtHandError(Exception):
    """This kind of database is not to be had here; the text says why."""


@dataclass(frozen=True)
class Database:
    """An empty place of one test's own: a schema on PostgreSQL, a database on MySQL, a file on SQLite."""

    name: str
    url: str
    schema: str | None = None

    def config(self, **options: Any) -> DatabaseConfig:
        return DatabaseConfig(**{"url": self.url, "schema": self.schema, "pool_size": 5, **options})

    def migrated(self, **options: Any) -> JobRepository:
        """A repository on this database with the tables made; close it."""
        repository = JobRepository.connect(self.config(**options))
        migrations.upgrade(repository.engine, repository.schema)
        return repository

    def plain_engine(self) -> Engine:
        """An engine as users make them: nothing of this package's settings; unqualified names mean this place."""
        if self.schema is None:
            return create_engine(self.url)
        return create_engine(self.url, connect_args={"options": f"-csearch_path={self.schema}"})


class Server:
    """Makes and drops fresh databases on one server."""

    name: str

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Database]:
        raise NotImplementedError
        yield

    def close(self) -> None:
        """Leave the server as it was found."""


class PostgresServer(Server):
    """A database for this run of the tests, and in it a schema for each test."""

    name = "postgresql"

    def __init__(self, url: str, close: Callable[[], None] = lambda: None) -> None:
        self._close = close
        self._admin = _administrator(normalise_url(url))
        self.database = f"dbpartition_test_{secrets.token_hex(4)}"
        self._execute(f"CREATE DATABASE {self.database}")
        self.url = normalise_url(url).set(database=self.database)
        self._inside = _administrator(self.url)

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Database]:
        schema = f"test_{secrets.token_hex(4)}"
        with self._inside.connect() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
        yield Database(self.name, _shown(self.url), schema)
        with contextlib.suppress(SQLAlchemyError), self._inside.connect() as connection:
            # What a failing test left open must not stop the next; the whole database goes in the end.
            connection.exec_driver_sql(f"SET lock_timeout = '2s'; DROP SCHEMA {schema} CASCADE")

    def close(self) -> None:
        self._execute(f"DROP DATABASE {self.database} WITH (FORCE)")
        self._close()

    def _execute(self, statement: str) -> None:
        with self._admin.connect() as connection:
            connection.exec_driver_sql(statement)


class MysqlServer(Server):
    """A database for each test."""

    name = "mysql"

    def __init__(self, url: str) -> None:
        self._url = normalise_url(url).set(database=None)
        self._admin = _administrator(self._url)
        with self._admin.connect() as connection:
            connection.exec_driver_sql("SELECT 1")

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Database]:
        database = f"dbpartition_test_{secrets.token_hex(4)}"
        with self._admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
        yield Database(self.name, _shown(self._url.set(database=database)))
        with contextlib.suppress(SQLAlchemyError), self._admin.connect() as connection:
            connection.exec_driver_sql("SET lock_wait_timeout = 5")
            connection.exec_driver_sql(f"DROP DATABASE {database}")


class SqliteServer(Server):
    """A file for each test."""

    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Database]:
        path = self._directory / f"{secrets.token_hex(4)}.sqlite"
        yield Database(self.name, f"sqlite:///{path}")
        for file in self._directory.glob(f"{path.name}*"):
            file.unlink(missing_ok=True)


class Servers:
    """The servers, looked for when first asked for, once a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: dict[str, Server | str] = {}

    def get(self, name: str) -> Server:
        """The server of that name.

        Raises:
            NotAtHandError: it is not to be had here.
        """
        if name not in self._found:
            try:
                self._found[name] = self._find(name)
            except NotAtHandError as reason:
                self._found[name] = str(reason)
        found = self._found[name]
        if isinstance(found, str):
            raise NotAtHandError(found)
        return found

    def close(self) -> None:
        for server in self._found.values():
            if isinstance(server, Server):
                server.close()

    def _find(self, name: str) -> Server:
        if name == "sqlite":
            return SqliteServer(self._directory)
        return self._find_mysql() if name == "mysql" else _find_postgres()

    def _find_mysql(self) -> Server:
        given = os.environ.get(MYSQL_VARIABLE)
        if given == NONE:
            raise NotAtHandError(f"{MYSQL_VARIABLE} says {NONE}")
        try:
            return MysqlServer(given or "mysql://root@127.0.0.1:3306/")
        except (SQLAlchemyError, ModuleNotFoundError) as error:
            if given:
                raise  # asked for by name: its absence is an error, not a reason to skip
            raise NotAtHandError(
                f"no MySQL or MariaDB answers on 127.0.0.1:3306 as root ({_last_line(error)}): set {MYSQL_VARIABLE}"
            ) from None


def _find_postgres() -> Server:
    given = os.environ.get(POSTGRES_VARIABLE)
    if given and given != EMBEDDED:
        return PostgresServer(given)
    if not given:
        with contextlib.suppress(SQLAlchemyError):
            return PostgresServer("postgresql://postgres@127.0.0.1:5432/postgres")
    from airflow_dbpartition.demo.embedded import EmbeddedPostgres
    from airflow_dbpartition.errors import DbPartitionError

    embedded = EmbeddedPostgres(settings={"fsync": "off"})
    try:
        embedded.start()
    except DbPartitionError as error:
        raise NotAtHandError(
            f"no PostgreSQL answers on 127.0.0.1:5432, and none can be embedded ({_last_line(error)}): "
            f"set {POSTGRES_VARIABLE}"
        ) from None
    return PostgresServer(embedded.url(), embedded.close)


def _administrator(url: URL) -> Engine:
    arguments: dict[str, Any] = {"connect_timeout": 5}
    return create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool, connect_args=arguments)


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def with_user(database: Database, user: str, password: str | None = None) -> Database:
    """The same place, seen by another user."""
    return Database(
        database.name, _shown(make_url(database.url).set(username=user, password=password)), database.schema
    )


def run_sql(database: Database, *statements: str) -> None:
    """Run statements as the administrator, each committed."""
    engine = create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        if database.schema is not None:
            quoted = engine.dialect.identifier_preparer.quote(database.schema)
            connection.execute(text(f"SET search_path = {quoted}"))
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%") if database.name != "sqlite" else statement)
