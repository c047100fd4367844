"""From an Airflow connection's fields to a database URL and settings: pure functions, without Airflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from airflow_dbpartition.config import DatabaseConfig, Timings, positive
from airflow_dbpartition.errors import ConfigurationError

OWN_TYPE = "dbpartition"
SCHEMA_EXTRA = "dbpartition_schema"
DIALECT_EXTRA = "dialect"

_BACKENDS = {
    "postgres": "postgresql",
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mariadb",
    "sqlite": "sqlite",
}

# What libpq takes besides host, port, user, password and dbname.
_LIBPQ = frozenset(
    "application_name channel_binding client_encoding connect_timeout fallback_application_name gssdelegation "
    "gssencmode gsslib hostaddr keepalives keepalives_count keepalives_idle keepalives_interval krbsrvname "
    "load_balance_hosts max_protocol_version min_protocol_version options passfile require_auth requirepeer service "
    "ssl_max_protocol_version ssl_min_protocol_version sslcert sslcertmode sslcompression sslcrl sslcrldir sslkey "
    "sslmode sslnegotiation sslpassword sslrootcert sslsni target_session_attrs tcp_user_timeout".split()
)
_PYMYSQL = frozenset(
    "ssl_ca ssl_cert ssl_key ssl_key_password ssl_check_hostname ssl_verify_cert ssl_verify_identity unix_socket "
    "bind_address auth_plugin_map server_public_key program_name".split()
)
# Settings of Airflow's own hooks that say nothing about how to connect.
_IRRELEVANT = frozenset(
    "cursor iam redshift workgroup-name cluster-identifier aws_conn_id region_name serverless charset".split()
)
_TIMINGS = tuple(item.name for item in fields(Timings))
_LIMITS = ("longest_poll_interval_s", "longest_no_nodes_timeout_s")

D = TypeVar("D", float, None)


class ConnectionFields(Protocol):
    """What is read of an Airflow connection; its extras are given apart, since reading them may do I/O."""

    conn_id: str
    conn_type: str | None
    host: str | None
    schema: str | None
    login: str | None
    password: str | None
    port: int | None


@dataclass(frozen=True)
class RepositoryAddress:
    """Where the job repository is, and the cluster's clockwork.

    Args:
        conn_id: the Airflow connection that it was read from, for messages.
        url: with the password, so it is not in the repr.
        schema: the database schema of the tables.
        timings: what "live" means; must agree with the workers'.
        connect_timeout_s: seconds for one connection attempt.
        longest_poll_interval_s: upper limit of the intervals at which tasks look while they wait; for tests.
        longest_no_nodes_timeout_s: upper limit of what tasks wait for nodes; for tests. None = none.
        unknown: extras that were left out because nobody here knows them.
    """

    conn_id: str
    url: str = field(repr=False)
    schema: str | None = None
    timings: Timings = field(default_factory=Timings)
    connect_timeout_s: float = 10.0
    longest_poll_interval_s: float = math.inf
    longest_no_nodes_timeout_s: float | None = None
    unknown: tuple[str, ...] = ()

    def config(self, *, pool_size: int) -> DatabaseConfig:
        """How to open it, keeping `pool_size` connections."""
        return DatabaseConfig(
            url=self.url,
            schema=self.schema,
            pool_size=pool_size,
            connect_timeout_s=self.connect_timeout_s,
            application_name="dbpartition-airflow",
        )


def supported_backend(connection: ConnectionFields, extra: Mapping[str, Any]) -> str | None:
    """The database behind a connection, such as "postgresql"; None where it is not one that we support."""
    kind = (connection.conn_type or "").strip().lower()
    if kind == OWN_TYPE:
        kind = str(extra.get(DIALECT_EXTRA) or "postgresql").strip().lower()
    return _BACKENDS.get(kind.replace("_", "+").partition("+")[0])


def database_url(connection: ConnectionFields, extra: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The SQLAlchemy URL of a connection, with its TLS and other driver settings, and the extras nobody knows.

    Raises:
        ConfigurationError: the connection is of another kind of database, or cannot be used.
    """
    from sqlalchemy.engine import URL

    backend = supported_backend(connection, extra)
    if backend is None:
        raise ConfigurationError(
            f"connection {connection.conn_id!r}: expected a connection of type {OWN_TYPE}, postgres, mysql, mariadb or "
            f"sqlite, got {connection.conn_type!r}" + _dialect_hint(connection, extra)
        )
    if backend == "sqlite":
        path = connection.host or connection.schema
        if not path:
            raise ConfigurationError(f"connection {connection.conn_id!r}: expected the file's path as host")
        return URL.create("sqlite", database=path).render_as_string(hide_password=False), ()
    if _is_true(extra.get("iam")):
        raise ConfigurationError(f"connection {connection.conn_id!r}: iam tokens are not supported; give a password")
    query, unknown = _driver_settings(backend, extra)
    host = connection.host or None
    if host is not None and host.startswith("/"):  # a socket's directory has no place before the first slash
        query.setdefault("host" if backend == "postgresql" else "unix_socket", host)
        host = None
    url = URL.create(
        backend,
        username=connection.login or None,
        password=connection.password or None,
        host=host,
        port=connection.port or None,
        database=connection.schema or None,
        query=query,
    )
    return url.render_as_string(hide_password=False), unknown


def repository_address(
    connection: ConnectionFields, extra: Mapping[str, Any], *, schema: str | None = None
) -> RepositoryAddress:
    """Where the job repository is, by an Airflow connection.

    Args:
        schema: wins over the connection's `dbpartition_schema`.

    Raises:
        ConfigurationError: the connection cannot be used; names it and the field.
    """
    url, unknown = database_url(connection, extra)
    return RepositoryAddress(
        conn_id=connection.conn_id,
        url=url,
        schema=schema or _schema(connection.conn_id, extra),
        timings=_timings(connection.conn_id, extra),
        connect_timeout_s=_seconds(connection.conn_id, extra, "connect_timeout", default=10.0),
        longest_poll_interval_s=_seconds(connection.conn_id, extra, "longest_poll_interval_s", default=math.inf),
        longest_no_nodes_timeout_s=_seconds(connection.conn_id, extra, "longest_no_nodes_timeout_s", default=None),
        unknown=unknown,
    )


def _dialect_hint(connection: ConnectionFields, extra: Mapping[str, Any]) -> str:
    if (connection.conn_type or "").lower() != OWN_TYPE:
        return ""
    return f" with {DIALECT_EXTRA} {extra.get(DIALECT_EXTRA)!r} (postgresql, mysql, mariadb or sqlite)"


def _driver_settings(backend: str, extra: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    known = _LIBPQ if backend == "postgresql" else _PYMYSQL
    ours = {SCHEMA_EXTRA, DIALECT_EXTRA, "sqlalchemy_query", "connect_timeout", *_TIMINGS, *_LIMITS, *_IRRELEVANT}
    given = dict(extra)
    if backend != "postgresql" and isinstance(given.get("ssl"), Mapping):  # as Airflow's MySQL connections write it
        given.update({f"ssl_{name}": value for name, value in given.pop("ssl").items()})
    query = {name: _text(value) for name, value in given.items() if name in known and value not in (None, "")}
    query.pop("connect_timeout", None)
    more = given.get("sqlalchemy_query")
    if isinstance(more, Mapping):
        query.update({str(name): _text(value) for name, value in more.items()})
    unknown = tuple(sorted(name for name in given if name not in known and name not in ours))
    return query, unknown


def _timings(conn_id: str, extra: Mapping[str, Any]) -> Timings:
    given = {name: _number(conn_id, name, extra[name]) for name in _TIMINGS if extra.get(name) not in (None, "")}
    try:
        return Timings(**given)
    except ConfigurationError as error:
        raise ConfigurationError(_named(conn_id, error)) from None


def _schema(conn_id: str, extra: Mapping[str, Any]) -> str | None:
    value = extra.get(SCHEMA_EXTRA)
    if value is None or isinstance(value, str):
        return value or None
    raise ConfigurationError(f"connection {conn_id!r}: expected {SCHEMA_EXTRA} to be text, got {value!r}")


def _seconds(conn_id: str, extra: Mapping[str, Any], name: str, *, default: D) -> float | D:
    value = extra.get(name)
    if value in (None, ""):
        return default
    try:
        return positive(name, _number(conn_id, name, value))
    except ConfigurationError as error:
        raise ConfigurationError(_named(conn_id, error)) from None


def _number(conn_id: str, name: str, value: object) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigurationError(f"connection {conn_id!r}: expected {name} to be a number, got {value!r}") from None


def _named(conn_id: str, error: ConfigurationError) -> str:
    """The error's words, with the connection before them if they do not name it yet."""
    name = f"connection {conn_id!r}: "
    return name + str(error).removeprefix(name)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_true(value: object) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes")
