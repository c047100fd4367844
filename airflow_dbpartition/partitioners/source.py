"""DatabasePartitioner: the base of partitioners that read a database; SQLAlchemy is imported when one reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_dbpartition.errors import ConfigurationError, DatabaseError
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.partitioners.base import BoundPartitioner
from airflow_dbpartition.partitioners.environment import PartitionerEnvironment

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

# The drivers that this package installs, for URLs (Airflow's connections among them) that name none.
# Other databases may be read as well, with SQLAlchemy's own choice.
_DRIVERS = {
    "postgres": "postgresql+psycopg2",
    "postgresql": "postgresql+psycopg2",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}


class DatabasePartitioner(BoundPartitioner):
    """Reads from an Airflow connection, a URL, or (neither given) the job repository's own database."""

    conn_id: str | None
    url: str | None

    def _source(self, conn_id: str | None, url: str | None) -> None:
        if conn_id and url:
            raise self._error(f"expected conn_id or url, got both (conn_id={conn_id!r})")
        self.conn_id = conn_id
        self.url = url

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        """A connection that only reads: whatever the query did is rolled back.

        Raises:
            DatabaseError: when the database refuses or cannot be reached.
        """
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._engine() as engine, engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            words = mask_secrets(str(getattr(error, "orig", None) or error)).strip()
            raise DatabaseError(f"{self!r} could not read from the database: {words}") from error

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        url = self._optional_text("url")
        if url is None:
            environment: PartitionerEnvironment = self.environment
            with environment.engine(self._optional_text("conn_id")) as engine:
                yield engine
            return
        engine = self._engine_of(url)
        try:
            yield engine
        finally:
            engine.dispose()

    def _engine_of(self, url: str) -> Engine:
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError
        from sqlalchemy.pool import NullPool

        scheme, separator, rest = url.partition("://")
        try:
            driver = _DRIVERS.get(scheme, scheme)
            return create_engine(f"{driver}{separator}{rest}", poolclass=NullPool, hide_parameters=True)
        except (ArgumentError, ImportError, ValueError) as error:
            # The error of a URL that cannot be parsed quotes it whole, password included: it is not chained.
            raise ConfigurationError(
                f"{type(self).__name__}: expected url to be a SQLAlchemy database URL whose driver is installed, "
                f"got {mask_secrets(url)!r} ({type(error).__name__})"
            ) from None
