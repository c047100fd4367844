"""Somebody on the database server who makes every kind of contention for the workers, at random, from a seed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import create_engine
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from tests.databases import Database, run_sql

TABLES = ("batch_nodes", "batch_partitions", "batch_job_executions", "batch_partition_events")
_SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dbpartition %%'"
# What the server's log says when a harm has really met somebody.
_SIGNS = {
    "deadlock": "ERROR:  deadlock detected",
    "injected": "ERROR:  sabotage",
    "cancelled": "ERROR:  canceling statement due to user request",
    "terminated": "FATAL:  terminating connection due to administrator command",
    "lock timeout": "ERROR:  canceling statement due to lock timeout",
    "statement timeout": "ERROR:  canceling statement due to statement timeout",
}


class Saboteur:
    """Does one harm after the other until the block ends.

    Args:
        server: PostgreSQL, as its superuser.
        database: of the workers.
        ledger: a table that the steps write.
        rng: from the seed.
    """

    def __init__(self, server: EmbeddedPostgres, database: Database, ledger: str, rng: random.Random) -> None:
        self._server = server
        self._database = database
        self._ledger = ledger
        self._tables = (*TABLES, ledger)
        self._rng = rng
        self._over = threading.Event()
        self.done: Counter[str] = Counter()
        self.broken: list[BaseException] = []
        run_sql(
            database,
            "CREATE TABLE sabotage (share float, at text)",
            "INSERT INTO sabotage VALUES (0, '')",
            "CREATE FUNCTION sabotage() RETURNS trigger LANGUAGE plpgsql AS $$"
            " DECLARE codes text[] := '{40P01, 40001, 55P03}';"
            " BEGIN IF random() < (SELECT share FROM sabotage WHERE at IN ('', TG_TABLE_NAME)) THEN"
            " RAISE EXCEPTION 'sabotage' USING ERRCODE = codes[1 + floor(3 * random())::int];"
            " END IF; RETURN NULL; END $$",
            *(
                f"CREATE TRIGGER sabotage BEFORE INSERT OR UPDATE ON {table} EXECUTE FUNCTION sabotage()"
                for table in self._tables
            ),
        )

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._log_start = self._server.log_path.stat().st_size
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(timeout=60)

    def met(self) -> dict[str, int]:
        """How often the server has said that somebody was harmed."""
        log = self._server.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        return {what: log.count(sign) for what, sign in _SIGNS.items()}

    def _work(self) -> None:
        harms = [self._raise_errors, self._hold_a_table, self._cross, self._cancel, self._terminate]
        engine = create_engine(self._database.url, poolclass=NullPool)
        while not self._over.is_set():
            self._rng.shuffle(harms)  # each of them as often as any other
            for harm in harms:
                try:
                    with engine.connect() as connection:
                        harm(connection)
                except Exception as error:  # noqa: BLE001 - the test is to hear of it
                    self.broken.append(error)
                    return
                self.done[harm.__name__.strip("_")] += 1
                self._wait(self._rng.uniform(0.05, 0.3))

    def _wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    # --- harms -------------------------------------------------------------------------------------------------

    def _raise_errors(self, connection: Connection) -> None:
        """A share of all writes ends with an error."""
        with self._errors(self._rng.uniform(0.1, 0.6)):
            self._wait(self._rng.uniform(0.2, 0.8))

    def _hold_a_table(self, connection: Connection, table: str | None = None) -> None:
        connection.exec_driver_sql(f"LOCK TABLE {table or self._rng.choice(self._tables)} IN ACCESS EXCLUSIVE MODE")
        self._wait(self._rng.uniform(0.3, 2.0))

    def _cross(self, connection: Connection) -> None:
        """Lock what runs, let it fail, then lock the executions: against the order of the retries, the victims."""
        connection.exec_driver_sql("SET deadlock_timeout = '1min'")  # who waits for so long is never the victim
        connection.exec_driver_sql("SET lock_timeout = '5s'")
        with self._errors(1.0, self._ledger):
            connection.exec_driver_sql("SELECT 1 FROM batch_partitions WHERE status = 'CLAIMED' FOR UPDATE")
            until = time.monotonic() + 2
            with suppress(SQLAlchemyError):
                while time.monotonic() < until:
                    with connection.begin_nested() as look:
                        connection.exec_driver_sql("SELECT 1 FROM batch_job_executions FOR UPDATE NOWAIT")
                        look.rollback()
                    self._wait(0.02)
        with suppress(SQLAlchemyError):
            connection.exec_driver_sql("SELECT 1 FROM batch_job_executions FOR UPDATE")

    @contextmanager
    def _errors(self, share: float, table: str = "") -> Iterator[None]:
        run_sql(self._database, f"UPDATE sabotage SET share = {share}, at = '{table}'")
        try:
            yield
        finally:
            run_sql(self._database, "UPDATE sabotage SET share = 0")

    def _cancel(self, connection: Connection) -> None:
        """End every statement that waits for a table that all of them want."""
        self._hold_a_table(connection, "batch_partitions")
        connection.exec_driver_sql(f"SELECT pg_cancel_backend(pid) {_SESSIONS} AND wait_event_type = 'Lock'")

    def _terminate(self, connection: Connection) -> None:
        """End some sessions, whatever they are doing."""
        connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) {_SESSIONS} AND random() < 0.4")
