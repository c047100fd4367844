"""What differs between databases: URLs, engines, types, and how an error is to be read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from airflow_dbpartition import migrations
from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import (
    UtcDateTime,
    age_s,
    db_later,
    db_now,
    explain,
    is_conflict,
    is_denied,
    is_disconnect,
    is_missing_table,
    joined_texts,
    make_engine,
    normalise_url,
)
from airflow_dbpartition.errors import ConfigurationError, DatabaseError, SchemaError
from airflow_dbpartition.schema import build_tables
from airflow_dbpartition.views import create_views_sql, drop_views_sql

DIALECTS: dict[str, Dialect] = {name: kind() for name, kind in migrations.DIALECTS.items()}

# --- urls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("postgres://u:p@h/d", "postgresql+psycopg2"),
        ("postgresql://u:p@h/d", "postgresql+psycopg2"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg2"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+psycopg2"),
        ("postgres+psycopg2://u:p@h/d", "postgresql+psycopg2"),
        ("  postgresql://u:p@h/d\n", "postgresql+psycopg2"),
        ("mysql://u:p@h/d", "mysql+pymysql"),
        ("mysql+mysqldb://u:p@h/d", "mysql+pymysql"),
        ("mariadb://u:p@h/d", "mariadb+pymysql"),
        ("sqlite:////tmp/x.sqlite", "sqlite"),
        ("sqlite+aiosqlite:////tmp/x.sqlite", "sqlite"),
    ],
)
def test_urls_are_read_as_people_and_airflow_write_them(given: str, driver: str) -> None:
    assert normalise_url(given).drivername == driver


def test_everything_but_the_driver_is_kept() -> None:
    url = normalise_url("postgres://us%40er:p%2Fw@host:5433/data?sslmode=require&application_name=x")
    assert (url.username, url.password, url.host, url.port, url.database) == ("us@er", "p/w", "host", 5433, "data")
    assert dict(url.query) == {"sslmode": "require", "application_name": "x"}


@pytest.mark.parametrize("given", ["oracle://h/d", "mssql+pyodbc://h/d", "snowflake://a/b", "http://h/d"])
def test_a_database_that_is_not_supported_is_named(given: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a database URL of postgresql, mysql, mariadb, sqlite, got"):
        normalise_url(given)


@pytest.mark.parametrize("given", ["", "nonsense", "host=h password=s3cret", "postgresql//u:s3cret@h/d", "://", "a b"])
def test_what_is_no_url_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        normalise_url(given)
    assert "expected a database URL" in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("given", ["postgresql://h:port/d", "postgresql://u:s3cret@h:99x/d"])
def test_a_port_that_is_no_number_is_refused_without_the_password(given: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        normalise_url(given)
    assert "s3cret" not in str(raised.value)


# --- engines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def sqlite_engine(tmp_path: Any) -> Iterator[Engine]:
    engine = make_engine(DatabaseConfig(url=f"sqlite:///{tmp_path}/x.sqlite"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "driver"), [("postgres://h/d", "psycopg2"), ("mysql://h/d", "pymysql"), ("mariadb://h/d", "pymysql")]
)
def test_servers_are_spoken_to_by_the_driver_we_know_and_errors_hide_their_parameters(url: str, driver: str) -> None:
    if driver == "pymysql":
        pytest.importorskip("pymysql")
    engine = make_engine(DatabaseConfig(url=url))
    assert engine.dialect.driver == driver
    assert engine.hide_parameters, "contexts and messages may hold secrets"


@pytest.mark.parametrize(("size", "pool"), [(0, NullPool), (1, QueuePool), (7, QueuePool)])
def test_a_pool_of_nothing_keeps_nothing(size: int, pool: type) -> None:
    engine = make_engine(DatabaseConfig(url="postgresql://h/d", pool_size=size))
    assert type(engine.pool) is pool
    if isinstance(engine.pool, QueuePool):
        assert engine.pool.size() == size


def test_sqlite_waits_at_begin_and_keeps_what_it_committed(sqlite_engine: Engine) -> None:
    with sqlite_engine.connect() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1
        assert connection.scalar(text("PRAGMA synchronous")) == 2
        other = make_engine(DatabaseConfig(url=str(sqlite_engine.url), lock_timeout_s=0.05))
        with pytest.raises(OperationalError) as raised, other.connect() as second:
            second.execute(text("SELECT 1"))
        other.dispose()
    assert is_conflict(raised.value), "a write lock that is held: try again"


# --- types and clocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mysql", "sqlite"])
def test_moments_are_stored_in_utc_and_come_back_aware(name: str) -> None:
    kind, dialect = UtcDateTime(), DIALECTS[name]
    moment = datetime(2024, 3, 31, 2, 30, tzinfo=timezone(timedelta(hours=2)))
    stored = kind.process_bind_param(moment, dialect)
    assert stored == datetime(2024, 3, 31, 0, 30)
    back = kind.process_result_value(stored, dialect)
    assert back == moment
    assert back is not None
    assert back.tzinfo is timezone.utc
    assert kind.process_bind_param(None, dialect) is None
    assert kind.process_result_value(None, dialect) is None


def test_on_postgresql_moments_keep_their_zone_on_the_way() -> None:
    moment = datetime(2024, 3, 31, 2, 30, tzinfo=timezone(timedelta(hours=2)))
    kind, dialect = UtcDateTime(), DIALECTS["postgresql"]
    assert kind.process_bind_param(moment, dialect) is moment
    back = kind.process_result_value(moment, dialect)
    assert back is not None
    assert (back, back.utcoffset()) == (moment, timedelta(0))


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    "element", [db_now(), db_later(-5), age_s(db_now()), joined_texts(text("x"))], ids=lambda one: type(one).__name__
)
def test_the_clock_is_always_the_databases(dialect: Dialect, element: Any) -> None:
    sql = str(select(element).compile(dialect=dialect, compile_kwargs={"literal_binds": True})).lower()
    clocks = ("statement_timestamp()", "utc_timestamp(6)", "'now'")
    assert "current_timestamp" not in sql, "the transaction's start, or the session's zone"
    assert any(clock in sql for clock in clocks) or "joined" in type(element).__name__


# --- schemas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "quoted"),
    [
        (None, ""),
        ("batch", "batch."),
        ("Mixed", '"Mixed".'),
        ("a b", '"a b".'),
        ('q"q', '"q""q".'),
        ("user", '"user".'),
    ],
)
def test_a_schema_is_quoted_where_it_must_be(schema: str | None, quoted: str) -> None:
    tables, dialect = build_tables(schema), DIALECTS["postgresql"]
    assert f"FROM {quoted}batch_nodes" in str(select(tables.nodes).compile(dialect=dialect))
    assert drop_views_sql(tables, dialect)[0] == f"DROP VIEW IF EXISTS {quoted}batch_cluster"
    assert create_views_sql(tables, dialect)[0].startswith(f"CREATE VIEW {quoted}batch_job_coordination AS ")


# --- reading errors ----------------------------------------------------------------------------------------------


class PostgresError(Exception):
    """As psycopg2 raises it: an SQLSTATE, or None where the server never answered."""

    def __init__(self, text: str, pgcode: str | None = None) -> None:
        super().__init__(text)
        self.pgcode = pgcode


def failed(orig: Exception, *, kind: type[DBAPIError] = OperationalError, broken: bool = False) -> DBAPIError:
    return kind("SELECT 1", None, orig, connection_invalidated=broken)


CONFLICTS = {
    "serialisation failure": failed(PostgresError("could not serialize", "40001")),
    "deadlock": failed(PostgresError("deadlock detected", "40P01")),
    "lock timeout": failed(PostgresError("canceling statement due to lock timeout", "55P03")),
    "mysql deadlock": failed(Exception(1213, "Deadlock found")),
    "mysql lock wait": failed(Exception(1205, "Lock wait timeout exceeded")),
    "mariadb snapshot": failed(Exception(1020, "Record has changed since last read")),
    "sqlite busy": failed(Exception("database is locked")),
}
DISCONNECTS = {
    "cut": failed(PostgresError("whatever"), broken=True),
    "refused": failed(PostgresError('connection to server at "h" (1.2.3.4), port 5432 failed: Connection refused')),
    "closed": failed(PostgresError("server closed the connection unexpectedly")),
    "mysql refused": failed(Exception(2003, "Can't connect to MySQL server")),
    "mysql gone": failed(Exception(2006, "MySQL server has gone away")),
    "mysql lost": failed(Exception(2013, "Lost connection")),
}
MISSING = {
    "postgresql table": failed(PostgresError('relation "batch_nodes" does not exist', "42P01"), kind=ProgrammingError),
    "postgresql schema": failed(PostgresError('schema "x" does not exist', "3F000"), kind=ProgrammingError),
    "mysql": failed(Exception(1146, "Table 'd.batch_nodes' doesn't exist"), kind=ProgrammingError),
    "sqlite": failed(Exception("no such table: batch_nodes")),
}
DENIED = {
    "postgresql": failed(PostgresError("permission denied for table batch_nodes", "42501"), kind=ProgrammingError),
    "mysql": failed(Exception(1142, "INSERT command denied to user 'u'@'h' for table `d`.`batch_nodes`")),
}
OTHERS = {
    "unique": failed(PostgresError("duplicate key", "23505"), kind=IntegrityError),
    "mysql unique": failed(Exception(1062, "Duplicate entry"), kind=IntegrityError),
    "statement timeout": failed(PostgresError("canceling statement due to statement timeout", "57014")),
    "wrong password": failed(Exception(1045, "Access denied for user 'u'@'h' (using password: YES)")),
    "disk full": failed(PostgresError("could not extend file", "53100")),
}
READERS = {
    "conflict": (is_conflict, CONFLICTS),
    "disconnect": (is_disconnect, DISCONNECTS),
    "missing table": (is_missing_table, MISSING),
    "denied": (is_denied, DENIED),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param(kind, error, id=name)
        for kind, errors in {**{key: value[1] for key, value in READERS.items()}, "other": OTHERS}.items()
        for name, error in errors.items()
    ],
)
def test_an_error_is_read_as_what_it_is_and_as_nothing_else(reader: str, kind: str, error: SQLAlchemyError) -> None:
    judge, _ = READERS[reader]
    assert judge(error) is (reader == kind)


@pytest.mark.parametrize("judge", [judge for judge, _ in READERS.values()])
def test_sqlalchemys_own_errors_are_none_of_these(judge: Any) -> None:
    assert not judge(SQLAlchemyError("database is locked, no such table, connection to server"))


@pytest.fixture
def unreached() -> Engine:
    return make_engine(DatabaseConfig(url="postgresql://u:s3cret@h/d"))


@pytest.mark.parametrize("error", MISSING.values(), ids=MISSING)
def test_missing_tables_are_explained_with_the_command(error: DBAPIError, unreached: Engine) -> None:
    explained = explain(error, unreached)
    assert isinstance(explained, SchemaError)
    assert str(explained) == (
        "the job repository's tables are missing in postgresql+psycopg2://u:***@h/d: run `dbpartition db upgrade`"
    )


@pytest.mark.parametrize("error", DENIED.values(), ids=DENIED)
def test_a_denial_is_explained_with_where_the_grants_are(error: DBAPIError, unreached: Engine) -> None:
    assert str(explain(error, unreached)).endswith(
        ": this user lacks a right; `dbpartition db sql` prints the roles and what each is granted"
    )


def test_an_error_is_one_line_without_passwords(unreached: Engine) -> None:
    """The driver's own words may hold the password, alone or in a URL, and several lines."""
    orig = PostgresError("FATAL: cannot log in\n\twith s3cret\nat postgresql://u:s3cret@h/d, password=s3cret", "28P01")
    explained = explain(failed(orig), unreached)
    assert isinstance(explained, DatabaseError)
    assert str(explained) == (
        "database postgresql+psycopg2://u:***@h/d: "
        "FATAL: cannot log in with *** at postgresql://u:***@h/d, password=***"
    )
