"""One transaction a unit of work, run again where that is safe, and errors turned into our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DisconnectionError, IntegrityError, NoResultFound, SQLAlchemyError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from airflow_dbpartition.dialects import OWN_TRANSACTION, STATEMENTS_ALONE, explain, is_conflict, is_disconnect
from airflow_dbpartition.repository.watchdog import WATCHDOG

T = TypeVar("T")


class _TryAgainError(Exception):
    """The transaction was rolled back, or is safe to repeat."""


class Transactions:
    """Runs units of work. Deadlocks, serialisation failures and lock timeouts are retried with a bound.

    A connection that broke before COMMIT was sent has changed nothing, so that unit of work is run again as well.
    One that broke *during* COMMIT may have changed everything: it is run again only where the work says that
    running it twice does what running it once does (`repeatable`).

    Args:
        engine: where.
        tries: how often in all.
        deadline_s: seconds after which one try's connection is cut, whatever the server does or does not do.
    """

    def __init__(self, engine: Engine, *, tries: int = 6, deadline_s: float = 60.0) -> None:
        self.engine = engine
        self._own = engine.execution_options(**{OWN_TRANSACTION: True})
        is_postgresql = engine.dialect.name == "postgresql"
        self._alone = self._own.execution_options(**{STATEMENTS_ALONE: True}) if is_postgresql else self._own
        self._tries = tries
        self._deadline_s = deadline_s
        # Before its first transaction the driver, SQLAlchemy and our own listeners talk on a new connection.
        event.listen(engine, "connect", self._connecting, insert=True)
        event.listen(engine, "checkout", self._connected)

    def _connecting(self, driver_connection: Any, _record: object) -> None:
        WATCHDOG.begin(driver_connection, self._deadline_s)

    def _connected(self, driver_connection: Any, _record: object, _proxy: object) -> None:
        WATCHDOG.end(driver_connection)
        if getattr(driver_connection, "closed", 0):
            # psycopg2 has noticed since it was last used; the pool makes another one.
            raise DisconnectionError("the connection was closed while nobody used it")

    def run(
        self,
        work: Callable[[Connection], T],
        *,
        repeatable: bool = True,
        conflicts: bool = False,
        atomic: bool = True,
    ) -> T:
        """Run `work` in one transaction and commit it.

        Args:
            work: gets the connection; must not commit, and must bear being called again from its start.
            repeatable: running the committed work once more does no harm.
            conflicts: a unique constraint that was hit, or a row that has vanished, means that another process was
                faster: look again.
            atomic: False where the work writes by one statement at most. On PostgreSQL each statement is then a
                transaction of its own, which saves the round trips of BEGIN and COMMIT.

        Raises:
            DatabaseError, SchemaError: when the database stays unwilling.
        """

        engine = self._own if atomic else self._alone

        def once() -> T:
            committing = engine is not self._own
            connected = False
            try:
                with engine.connect() as connection:
                    connected = True
                    with WATCHDOG.watch(connection.connection.driver_connection, self._deadline_s):
                        result = work(connection)
                        committing = True
                        connection.commit()
                    return result
            except (IntegrityError, NoResultFound) as error:
                if conflicts:
                    raise _TryAgainError from error
                raise
            except SQLAlchemyError as error:
                broken = connected and is_disconnect(error) and (repeatable or not committing)
                if is_conflict(error) or broken:
                    raise _TryAgainError from error
                raise

        retrying = Retrying(
            stop=stop_after_attempt(self._tries),
            wait=wait_random_exponential(multiplier=0.02, max=1.0),
            retry=retry_if_exception_type(_TryAgainError),
            reraise=True,
        )
        try:
            return retrying(once)
        except _TryAgainError as error:
            cause = error.__cause__
            assert isinstance(cause, SQLAlchemyError)
            raise explain(cause, self.engine) from cause
        except SQLAlchemyError as error:
            raise explain(error, self.engine) from error


def notify(connection: Connection, channel: str, payload: str) -> None:
    """Wake whoever listens once this transaction commits; only PostgreSQL can, elsewhere polling does it."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_notify(:channel, :payload)"), {"channel": channel, "payload": payload})
