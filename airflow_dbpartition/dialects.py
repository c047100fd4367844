"""What differs between databases: engines, the database's clock, types, and how an error is to be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    DateTime,
    Dialect,
    Integer,
    Text,
    create_engine,
    event,
    func,
    true,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.engine.interfaces import ExecutionContext
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Double, TypeDecorator, TypeEngine

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.errors import ConfigurationError, DatabaseError, DbPartitionError, SchemaError
from airflow_dbpartition.forks import keep_connections_from_forks
from airflow_dbpartition.masking import mask_secrets
from airflow_dbpartition.storable import dump_json

SUPPORTED = ("postgresql", "mysql", "mariadb", "sqlite")
# The execution option of an engine whose transactions hold nothing but our own statements: none of them idles.
OWN_TRANSACTION = "dbpartition_own_transaction"
# The execution option of an engine of PostgreSQL where each of our statements is a transaction of its own.
STATEMENTS_ALONE = "dbpartition_statements_alone"
# The execution option of a COPY on PostgreSQL: what executes it, given the driver's cursor and the statement.
COPIED_BY = "dbpartition_copied_by"
COMMIT_WITHIN_S = 10
_SILENCE_IS_LIMITED = "dbpartition_silence_is_limited"  # of a pooled connection to MariaDB
UPGRADE_HINT = "run `dbpartition db upgrade`"
GRANTS_HINT = "this user lacks a right; `dbpartition db sql` prints the roles and what each is granted"


# --- types -----------------------------------------------------------------------------------------------------


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: timestamptz on PostgreSQL, DATETIME(6) on MySQL, ISO text on SQLite; aware in Python."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(timezone.utc).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


# SQLite counts rows only in a column that is declared INTEGER PRIMARY KEY.
BigId = BigInteger().with_variant(Integer(), "sqlite")
JsonValue = JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


# --- the database's clock --------------------------------------------------------------------------------------


class db_now(FunctionElement[datetime]):
    """The database's clock at the start of the statement, UTC."""

    type = UtcDateTime()
    inherit_cache = True


class db_later(FunctionElement[datetime]):
    """The database's clock plus a number of seconds (negative = ago)."""

    type = UtcDateTime()
    inherit_cache = True


class age_s(FunctionElement[float]):
    """Seconds since a stored moment, by the database's clock."""

    type = Double()
    inherit_cache = True


class joined_texts(FunctionElement[str]):
    """A text column of a group, joined by commas."""

    type = Text()
    inherit_cache = True


_SQLITE_FORMAT = "'%Y-%m-%d %H:%M:%f000'"  # 6 decimals, as SQLAlchemy writes them: text order is time order


def _compiled(element: type[FunctionElement[Any]], *dialects: str) -> Callable[..., Any]:
    return compiles(element, *dialects)


@_compiled(db_now, "postgresql")
def _(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "statement_timestamp()"


@_compiled(db_now, "mysql", "mariadb")
def _(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "utc_timestamp(6)"


@_compiled(db_now, "sqlite")
def _(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strftime({_SQLITE_FORMAT}, 'now')"


@_compiled(db_later, "postgresql")
def _(element: db_later, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(statement_timestamp() + {compiler.process(element.clauses, **kw)} * interval '1 second')"


@_compiled(db_later, "mysql", "mariadb")
def _(element: db_later, compiler: SQLCompiler, **kw: Any) -> str:
    micros = f"cast({compiler.process(element.clauses, **kw)} * 1000000 as signed)"
    return f"timestampadd(microsecond, {micros}, utc_timestamp(6))"


@_compiled(db_later, "sqlite")
def _(element: db_later, compiler: SQLCompiler, **kw: Any) -> str:
    return f"strftime({_SQLITE_FORMAT}, 'now', {compiler.process(element.clauses, **kw)} || ' seconds')"


@_compiled(age_s, "postgresql")
def _(element: age_s, compiler: SQLCompiler, **kw: Any) -> str:
    return f"cast(extract(epoch from (statement_timestamp() - {compiler.process(element.clauses, **kw)})) as float)"


@_compiled(age_s, "mysql", "mariadb")
def _(element: age_s, compiler: SQLCompiler, **kw: Any) -> str:
    inner = compiler.process(element.clauses, **kw)
    return f"(timestampdiff(microsecond, {inner}, utc_timestamp(6)) / 1000000.0)"


@_compiled(age_s, "sqlite")
def _(element: age_s, compiler: SQLCompiler, **kw: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **kw)})) * 86400.0)"


@_compiled(joined_texts, "postgresql")
def _(element: joined_texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"string_agg({compiler.process(element.clauses, **kw)}, ', ')"


@_compiled(joined_texts, "mysql", "mariadb")
def _(element: joined_texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"group_concat({compiler.process(element.clauses, **kw)} separator ', ')"


@_compiled(joined_texts, "sqlite")
def _(element: joined_texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"group_concat({compiler.process(element.clauses, **kw)}, ', ')"


# --- engines ---------------------------------------------------------------------------------------------------

_DRIVERS = {
    "postgres": "postgresql+psycopg2",
    "postgresql": "postgresql+psycopg2",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "sqlite",
}


def normalise_url(text: str) -> URL:
    """Read a URL as people and Airflow write it, with the driver that this package is built on.

    SQLAlchemy 2.1's own default for `postgresql://` is psycopg 3; here it is psycopg2.

    Raises:
        ConfigurationError: for text that is no URL, or a database that is not supported (password masked).
    """
    try:
        url = make_url(re.sub(r"^postgres(?=[:+])", "postgresql", text.strip()))
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"expected a database URL such as postgresql://user:password@host/database, got {mask_secrets(text)!r}"
        ) from None
    backend = url.drivername.split("+")[0]
    if backend not in _DRIVERS:
        raise ConfigurationError(f"expected a database URL of {', '.join(SUPPORTED)}, got {backend!r}")
    return url.set(drivername=_DRIVERS[backend])


def make_engine(config: DatabaseConfig) -> Engine:
    """An engine at READ COMMITTED, set explicitly and never inherited, whose every wait has an end.

    Raises:
        ConfigurationError: for a URL that cannot be used, or a driver that is not installed.
    """
    url = normalise_url(config.url)
    backend = url.get_backend_name()
    options: dict[str, Any] = {
        "json_serializer": dump_json,
        "hide_parameters": True,  # contexts and messages may hold secrets
    }
    if config.pool_size == 0:
        options["poolclass"] = NullPool
    else:
        options.update(poolclass=QueuePool, pool_size=config.pool_size, max_overflow=5, pool_timeout=30)
        # A step may compute for long between two transactions, and nobody else would notice for it that the
        # connection has ended meanwhile; our own verbs begin again.
        options["pool_pre_ping"] = config.statement_timeout_s is None
    try:
        if backend == "postgresql":
            options["connect_args"] = _postgresql_connect_args(config, url)
            engine = create_engine(url, **options)
            _limit_statements(engine, config)
            _copy_where_asked(engine)
        elif backend == "sqlite":
            options["connect_args"] = {"timeout": config.lock_timeout_s, "check_same_thread": False}
            engine = create_engine(url, **options)
            _immediate_transactions(engine)
        else:
            options["connect_args"] = _mysql_connect_args(config, url)
            engine = create_engine(url, isolation_level="READ COMMITTED", **options)
            _limit_silence_anew(engine, config)
    except ModuleNotFoundError as error:
        extra = "mysql" if backend in ("mysql", "mariadb") else None
        hint = f"pip install 'airflow-dbpartition[{extra}]'" if extra else f"install {error.name}"
        raise ConfigurationError(f"the driver for {backend} is not installed ({error.name}): {hint}") from None
    keep_connections_from_forks(engine)
    return engine


def _postgresql_connect_args(config: DatabaseConfig, url: URL) -> dict[str, Any]:
    ours = {
        "connect_timeout": max(2, round(config.connect_timeout_s)),
        "application_name": config.application_name,
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": int(1000 * (config.statement_timeout_s or 30.0)),
    }
    return {name: value for name, value in ours.items() if name not in url.query}  # what the URL says wins


def _mysql_connect_args(config: DatabaseConfig, url: URL) -> dict[str, Any]:
    lock_timeout_s = max(1, round(config.lock_timeout_s))
    settings = [
        f"SESSION innodb_lock_wait_timeout = {lock_timeout_s}",
        f"SESSION lock_wait_timeout = {lock_timeout_s}",  # of whole tables: LOCK TABLES, ALTER TABLE; a day by default
        "SESSION time_zone = '+00:00'",
    ]
    silence_limit = f"/*M! , SESSION {_mariadb_silence_limit(config)} */"  # a comment, to MySQL
    args: dict[str, Any] = {
        "connect_timeout": max(1, round(config.connect_timeout_s)),
        "init_command": f"SET {', '.join(settings)} {silence_limit}",
        "charset": "utf8mb4",
    }
    if url.password is not None:
        args["password"] = str(url.password).encode()  # PyMySQL would take text for Latin-1
    if config.statement_timeout_s is not None:
        args["read_timeout"] = args["write_timeout"] = max(1, round(config.statement_timeout_s))
    return args


def _limit_statements(engine: Engine, config: DatabaseConfig) -> None:
    """Per transaction, not per session: behind a pooler in transaction mode a session is not ours to set."""
    statement_ms = 0 if config.statement_timeout_s is None else int(config.statement_timeout_s * 1000)
    command = f"SET LOCAL lock_timeout = {int(config.lock_timeout_s * 1000)}"
    if statement_ms:
        command += f"; SET LOCAL statement_timeout = {statement_ms}"
    # A process that is frozen between two statements holds its locks, and nobody else could judge its node.
    own = f"{command}; SET LOCAL idle_in_transaction_session_timeout = {statement_ms}" if statement_ms else command
    # Said here and not to the driver, which would say more to the server whenever a connection changes its ways.
    isolation = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "

    @event.listens_for(engine, "begin")
    def limit(connection: Connection) -> None:
        options = connection.get_execution_options()
        wanted = options.get("isolation_level")
        if options.get(STATEMENTS_ALONE):
            _autocommit(connection.connection.driver_connection, True)
        elif wanted != "AUTOCOMMIT":
            # Whoever streams with a server's cursor has said so of the whole connection: SET has no rows to stream.
            unstreamed = {"stream_results": False, "yield_per": None}
            limits = ("" if wanted else isolation) + (own if options.get(OWN_TRANSACTION) else command)
            connection.exec_driver_sql(limits, execution_options=unstreamed)

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def limit_alone(
        connection: Connection, _cursor: object, statement: str, parameters: Any, _context: object, _many: bool
    ) -> tuple[str, Any]:
        # What a message holds is one transaction, which begins with its limits: no round trip is spent on them.
        if connection.get_execution_options().get(STATEMENTS_ALONE):
            statement = f"{isolation}{command}; {statement}"
        return statement, parameters

    @event.listens_for(engine, "checkin")
    def end_alone(driver_connection: Any, _record: object) -> None:
        if driver_connection is not None:
            _autocommit(driver_connection, False)


def _copy_where_asked(engine: Engine) -> None:
    """A COPY is executed like any other statement, so that its errors are told and retried like any other's."""

    @event.listens_for(engine, "do_execute")
    def copy(cursor: Any, statement: str, _parameters: object, context: ExecutionContext) -> bool:
        copied_by = context.execution_options.get(COPIED_BY)
        if copied_by is not None:
            copied_by(cursor, statement)
        return copied_by is not None


def _autocommit(driver_connection: Any, is_on: bool) -> None:
    """Nothing is sent; what is closed already says so to whoever uses it next."""
    with contextlib.suppress(driver_connection.__class__.InterfaceError):
        driver_connection.autocommit = is_on


def _mariadb_silence_limit(config: DatabaseConfig) -> str:
    """How long a transaction may be silent: a user's for as long as the server's own default says."""
    limit_s = "DEFAULT" if config.statement_timeout_s is None else max(1, round(config.statement_timeout_s))
    return f"idle_transaction_timeout = {limit_s}"


def _limit_silence_anew(engine: Engine, config: DatabaseConfig) -> None:
    """On MariaDB what `end_if_silent` sets lasts as long as the session: each transaction begins as the first did."""

    @event.listens_for(engine, "begin")
    def unlimit(connection: Connection) -> None:
        if connection.info.pop(_SILENCE_IS_LIMITED, False):
            connection.exec_driver_sql(f"SET SESSION {_mariadb_silence_limit(config)}")


def end_if_silent(connection: Connection) -> ColumnElement[bool]:
    """Let the server end a transaction that is silent for `COMMIT_WITHIN_S` after the statement that has this guard.

    A process that is frozen, or cut off, before its COMMIT would keep what it has locked for as long as its session
    lives. MySQL, unlike MariaDB, has no such limit; SQLite's locks end with their process.
    """
    if connection.dialect.name == "postgresql":
        return func.set_config("idle_in_transaction_session_timeout", f"{COMMIT_WITHIN_S}s", True) != ""
    if getattr(connection.dialect, "is_mariadb", False):
        connection.exec_driver_sql(f"SET SESSION idle_transaction_timeout = {COMMIT_WITHIN_S}")
        connection.info[_SILENCE_IS_LIMITED] = True
    return true()


def _immediate_transactions(engine: Engine) -> None:
    """SQLite upgrades a read lock only by luck; take the write lock at BEGIN, and wait for it there."""

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


# --- reading errors --------------------------------------------------------------------------------------------

_CONFLICT_STATES = {"40001", "40P01", "55P03"}
_MYSQL_CONFLICTS = {1020, 1205, 1213}
_MISSING_TABLE_STATES = {"42P01", "3F000"}
_DENIED_STATES = {"42501"}
_MYSQL_DENIALS = {1044, 1142, 1143, 1227, 1370}
# A check that fails (MariaDB: also JSON of more than 31 levels), JSON that is too deep or none.
_MYSQL_REFUSALS = {3140, 3157, 3819, 4025}


def _mysql_code(error: DBAPIError) -> int | None:
    args = getattr(error.orig, "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def is_conflict(error: SQLAlchemyError) -> bool:
    """A deadlock, serialisation failure or lock timeout: the transaction was rolled back and may run again."""
    if not isinstance(error, DBAPIError):
        return False
    if getattr(error.orig, "pgcode", None) in _CONFLICT_STATES or _mysql_code(error) in _MYSQL_CONFLICTS:
        return True
    return "database is locked" in str(error.orig)


def is_disconnect(error: SQLAlchemyError) -> bool:
    """The connection broke, or could not be made."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    if _mysql_code(error) in (2003, 2006, 2013, 2055):
        return True
    text = str(error.orig)
    return getattr(error.orig, "pgcode", None) is None and (
        "could not connect" in text or "connection to server" in text or "server closed the connection" in text
    )


def is_refused(error: SQLAlchemyError) -> bool:
    """These values cannot be stored, however often it is tried."""
    if isinstance(error, (DataError, IntegrityError)):
        return True
    return isinstance(error, DBAPIError) and _mysql_code(error) in _MYSQL_REFUSALS


def is_missing_table(error: SQLAlchemyError) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    if getattr(error.orig, "pgcode", None) in _MISSING_TABLE_STATES or _mysql_code(error) == 1146:
        return True
    return "no such table" in str(error.orig)


def is_denied(error: SQLAlchemyError) -> bool:
    """The user may not do this (logging in is another thing)."""
    if not isinstance(error, DBAPIError):
        return False
    return getattr(error.orig, "pgcode", None) in _DENIED_STATES or _mysql_code(error) in _MYSQL_DENIALS


def explain(error: SQLAlchemyError, engine: Engine) -> DbPartitionError:
    """Our own error for a driver's: one line, the place named, secrets masked."""
    place = engine.url.render_as_string(hide_password=True)
    if is_missing_table(error):
        return SchemaError(f"the job repository's tables are missing in {place}: {UPGRADE_HINT}")
    orig = error.orig if isinstance(error, DBAPIError) else error
    words = " ".join(mask_secrets(str(orig)).split())
    if engine.url.password:
        words = words.replace(str(engine.url.password), "***")
    return DatabaseError(f"database {place}: {words}" + (f": {GRANTS_HINT}" if is_denied(error) else ""))
