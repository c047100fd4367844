"""What PostgreSQL's NOTIFY says on a channel, heard on the very connection that an engine's queries use."""

from __future__ import annotations

import contextlib
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.repository import sessions
from airflow_dbpartition.repository.watchdog import WATCHDOG

LISTEN_WITHIN_S = 10.0


class Notifications:
    """LISTENs on each connection of the engine before its first transaction.

    So what is committed before a query is seen by the query, and what is committed after it is heard.

    Args:
        engine: keeps one connection, and is never used by two threads at once; the same goes for this object.
        channel: a name that needs no quotes.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        self._place = engine.url.render_as_string(hide_password=True)
        self._channel = channel
        self._known: Any = None
        self._session: Any = None
        if engine.dialect.name == "postgresql":
            event.listen(engine, "checkout", self._listen)

    @property
    def session(self) -> Any:
        """The driver connection that listens, for `select`; None on other databases, and behind a pooler."""
        return self._session

    def take(self) -> set[str]:
        """The payloads that have come since the last call; never waits.

        Raises:
            DatabaseError: the session has ended.
        """
        if self._session is None:
            return set()
        try:
            self._session.poll()
        except Exception as error:
            words = " ".join(mask_secrets(str(error)).split())
            raise DatabaseError(f"database {self._place}: {words}") from error
        payloads = {notification.payload for notification in self._session.notifies}
        del self._session.notifies[:]
        return payloads

    def _listen(self, driver_connection: Any, _record: object, _proxy: object) -> None:
        if driver_connection is self._known:
            return
        self._known, self._session = driver_connection, None
        # What refuses, or dies, here is left to polling, or to the transaction that follows.
        with contextlib.suppress(Exception), WATCHDOG.watch(driver_connection, LISTEN_WITHIN_S):
            try:
                if sessions.is_own(driver_connection):
                    with driver_connection.cursor() as cursor:
                        cursor.execute(f"LISTEN {self._channel}")
                    driver_connection.commit()
                    self._session = driver_connection
            finally:
                driver_connection.rollback()
