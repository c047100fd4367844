"""What those who want the same rows do to one another, made on purpose: errors and locks; and what was met of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import create_engine, event, select
from sqlalchemy.engine import Engine, ExceptionContext, make_url
from sqlalchemy.pool import NullPool

from airflow_dbpartition.repository import JobRepository
from tests.databases import Database, run_sql
from tests.worker.processes import wait_until

ALWAYS = 10**6
# Deadlock, serialisation failure (MariaDB: the row has changed since the snapshot) and lock timeout.
CONFLICTS: dict[str, tuple[Any, ...]] = {"postgresql": ("40P01", "40001", "55P03"), "mysql": (1213, 1020, 1205)}
INJECTED = "injected by the test"
_HOLD = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('BEGIN IMMEDIATE'); print(1, flush=True); input()"


class Injector:
    """Makes writes of a table end with errors. The count of writes outlives their rollback."""

    def __init__(self, database: Database) -> None:
        self._database = database
        prefix = f"{database.schema}." if database.schema else ""
        self._count = f"{prefix}injected"
        self._armed: list[str] = []
        if database.name == "postgresql":
            run_sql(
                database,
                "CREATE SEQUENCE injected",
                "CREATE FUNCTION inject() RETURNS trigger LANGUAGE plpgsql AS $$"
                f" DECLARE write bigint := nextval('{self._count}'); codes text[] := string_to_array(TG_ARGV[1], ' ');"
                " BEGIN IF write <= TG_ARGV[0]::bigint THEN RAISE EXCEPTION"
                f" '{INJECTED}' USING ERRCODE = codes[1 + (write - 1) % cardinality(codes)];"
                " END IF; RETURN NULL; END $$",
            )
        else:
            run_sql(database, "CREATE TABLE injected (writes integer) ENGINE=MyISAM", "INSERT INTO injected VALUES (0)")

    def arm(self, table: str, *codes: Any, times: int, at_commit: bool = False) -> None:
        """So many writes end with these errors in turn; `at_commit` = only when their transaction commits."""
        self.disarm()
        if self._database.name == "postgresql":
            kind, when = ("CONSTRAINT ", "DEFERRABLE INITIALLY DEFERRED ") if at_commit else ("", "")
            statements = [
                "SELECT setval('injected', 1, false)",
                f"CREATE {kind}TRIGGER inject AFTER INSERT OR UPDATE OR DELETE ON {table} {when}"
                f"FOR EACH ROW EXECUTE FUNCTION inject('{times}', '{' '.join(codes)}')",
            ]
            self._armed = [f"DROP TRIGGER inject ON {table}"]
        else:
            cases = " ".join(
                f"WHEN {number} THEN SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = '{INJECTED}';"
                for number, code in enumerate(codes)
            )
            statements = ["UPDATE injected SET writes = 0"]
            statements += [
                f"CREATE TRIGGER inject_{verb} AFTER {verb} ON {table} FOR EACH ROW BEGIN "
                "DECLARE before_this integer; SELECT writes INTO before_this FROM injected; "
                "UPDATE injected SET writes = writes + 1; "
                f"IF before_this < {times} THEN CASE before_this % {len(codes)} {cases} END CASE; END IF; END"
                for verb in ("INSERT", "UPDATE", "DELETE")
            ]
            self._armed = [f"DROP TRIGGER inject_{verb}" for verb in ("INSERT", "UPDATE", "DELETE")]
        run_sql(self._database, *statements)

    def disarm(self) -> None:
        run_sql(self._database, *self._armed)
        self._armed = []


def snapshot(repository: JobRepository) -> dict[str, list[str]]:
    """Every row of every table."""
    with repository.engine.connect() as connection:
        return {
            table.name: sorted(repr(row) for row in connection.execute(select(table)))
            for table in repository.tables.metadata.sorted_tables
        }


@dataclass(eq=False)
class Met:
    """The driver's errors that an engine has met, in order."""

    errors: list[BaseException] = field(default_factory=list)
    then: Callable[[], None] = lambda: None

    def __call__(self, context: ExceptionContext) -> None:
        self.errors.append(context.original_exception)
        self.then()

    @property
    def codes(self) -> list[Any]:
        """SQLSTATE on PostgreSQL, the server's number on MySQL, the words of SQLite."""
        return [getattr(error, "pgcode", None) or error.args[0] for error in self.errors]


def met_by(engine: Engine, then: Callable[[], None] = lambda: None) -> Met:
    """Note what the engine meets from now on, and do something at each error."""
    met = Met(then=then)
    event.listen(engine, "handle_error", met)
    return met


@contextlib.contextmanager
def locked(database: Database, table: str) -> Iterator[Callable[[], None]]:
    """Somebody else holds the whole table (SQLite: the only lock that there is) until the given function is called."""
    with contextlib.ExitStack() as until_released:
        if database.name == "sqlite":
            command = [sys.executable, "-c", _HOLD, str(make_url(database.url).database)]
            holder = until_released.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert holder.stdout is not None
            assert holder.stdout.readline()
            until_released.callback(holder.kill)
        else:
            engine = create_engine(database.url, poolclass=NullPool)
            connection = until_released.enter_context(engine.connect())
            if database.name == "postgresql":
                connection.exec_driver_sql(f"LOCK TABLE {database.schema}.{table} IN ACCESS EXCLUSIVE MODE")
            else:
                connection.exec_driver_sql(f"LOCK TABLES {table} WRITE")
        yield until_released.close


def wait_until_somebody_waits(database: Database) -> int:
    """Wait until a session waits for a table of this database that is locked; returns its number."""
    query = (
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%{}%%'"
        if database.name == "postgresql"
        else "SELECT id FROM information_schema.processlist WHERE state LIKE 'Waiting for table%%' AND db = '{}'"
    ).format(database.schema or make_url(database.url).database)
    engine = create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        return int(wait_until(lambda: connection.exec_driver_sql(query).scalar(), "somebody waits for a lock"))
