"""PostgreSQL for a benchmark: durable, as it comes, with a fresh database whenever one is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg2
from sqlalchemy import make_url

from airflow_dbpartition.demo.embedded import EmbeddedPostgres


class Server:
    """A running PostgreSQL."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self.embedded = embedded
        self._numbers = itertools.count(1)
        self.version = str(rows(embedded.url(), "SHOW server_version")[0][0])

    def fresh_database(self, name: str) -> str:
        """Create a database that nobody used before, and return its SQLAlchemy URL."""
        return self.embedded.create_database(f"{name}_{next(self._numbers)}")

    def drop(self, url: str) -> None:
        """Remove a database and whoever is still connected to it, so that it takes no autovacuum from the next."""
        rows(self.embedded.url(), f'DROP DATABASE "{make_url(url).database}" WITH (FORCE)')

    def checkpoint(self) -> None:
        """Write out what was changed so far: or it is written in the middle of somebody else's round."""
        rows(self.embedded.url(), "CHECKPOINT")


@contextmanager
def server(settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a PostgreSQL at its defaults (so fsync and synchronous_commit are on), but for `settings`."""
    with EmbeddedPostgres(settings=settings) as embedded:
        running = Server(embedded)
        _insist_on_durability(running)
        yield running


def libpq_url(url: str) -> str:
    """Return an SQLAlchemy URL as libpq and the drivers of peers read it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def rows(url: str, statement: str, parameters: object = None) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own, in a transaction of its own."""
    connection = psycopg2.connect(libpq_url(url))
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def _insist_on_durability(running: Server) -> None:
    for name in ("fsync", "synchronous_commit", "full_page_writes"):
        ((value,),) = rows(running.embedded.url(), f"SHOW {name}")
        if value != "on":
            raise SystemExit(f"{name} is {value}: figures of a database that may forget are worth nothing")
