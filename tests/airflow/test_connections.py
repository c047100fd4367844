"""Airflow connections as addresses of a job repository: every kind, every setting, and what is wrong in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import Connection
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text
from sqlalchemy.engine import make_url

from airflow_dbpartition import hooks
from airflow_dbpartition.config import Timings
from airflow_dbpartition.connections import RepositoryAddress, repository_address, supported_backend
from airflow_dbpartition.demo.processes import free_port
from airflow_dbpartition.dialects import make_engine
from airflow_dbpartition.errors import ConfigurationError, DatabaseError, SchemaError
from airflow_dbpartition.hooks import JobRepositoryHook, open_repository, opened
from airflow_dbpartition.repository import JobRepository
from tests.airflow.worlds import connection_to, define
from tests.databases import Database, run_sql, with_user
from tests.scenarios import add_node, finish_all, submit

AWKWARD = "p@ss:w/r d?#%&=+'\"\\;[]{}"


def connection(conn_type: str = "postgres", extra: object = None, **fields: Any) -> Connection:
    given: dict[str, Any] = {"host": "db.example", "login": "user", "password": "secret", "schema": "jobs", **fields}
    return Connection(conn_id="repo", conn_type=conn_type, extra=None if extra is None else json.dumps(extra), **given)


def address(conn_type: str = "postgres", extra: object = None, **fields: Any) -> RepositoryAddress:
    found = connection(conn_type, extra, **fields)
    return repository_address(found, found.extra_dejson)


def driver_arguments(found: RepositoryAddress) -> dict[str, Any]:
    """What the driver's connect() is called with."""
    engine = make_engine(found.config(pool_size=0))
    try:
        _, arguments = engine.dialect.create_connect_args(engine.url)
        return dict(arguments)
    finally:
        engine.dispose()


# --- kinds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conn_type", "extra", "backend"),
    [
        ("postgres", {}, "postgresql"),
        ("postgresql", {}, "postgresql"),
        ("postgresql+psycopg2", {}, "postgresql"),
        ("postgresql_psycopg", {}, "postgresql"),
        ("Postgres", {}, "postgresql"),
        ("mysql", {}, "mysql"),
        ("mysql+pymysql", {}, "mysql"),
        ("mariadb", {}, "mariadb"),
        ("sqlite", {}, "sqlite"),
        ("dbpartition", {}, "postgresql"),
        ("dbpartition", {"dialect": ""}, "postgresql"),
        ("dbpartition", {"dialect": "mysql"}, "mysql"),
        ("dbpartition", {"dialect": "MariaDB"}, "mariadb"),
        ("dbpartition", {"dialect": "sqlite"}, "sqlite"),
    ],
)
def test_every_kind_of_connection_leads_to_its_database(conn_type: str, extra: dict[str, str], backend: str) -> None:
    found = connection(conn_type, extra)
    assert supported_backend(found, extra) == backend
    assert make_url(repository_address(found, extra).url).get_backend_name() == backend


def test_host_port_login_and_database_arrive() -> None:
    arguments = driver_arguments(address(port=6543))
    assert arguments["host"] == "db.example"
    assert arguments["port"] == 6543
    assert arguments["user"] == "user"
    assert arguments["password"] == "secret"
    assert arguments["dbname"] == "jobs"


def test_a_sockets_directory_may_stand_for_the_host() -> None:
    assert driver_arguments(address(host="/var/run/postgresql"))["host"] == "/var/run/postgresql"
    assert "unix_socket" in make_url(address("mysql", host="/run/mysqld/mysqld.sock").url).query


def test_tls_and_other_settings_of_libpq_arrive() -> None:
    extra = {
        "sslmode": "verify-full",
        "sslrootcert": "/certs/ca.pem",
        "sslcert": "/certs/me.pem",
        "sslkey": "/certs/me key.pem",
        "options": "-c search_path=a,b",
        "application_name": "the nightly job",
        "target_session_attrs": "read-write",
    }
    arguments = driver_arguments(address(extra=extra))
    assert {name: arguments[name] for name in extra} == extra


def test_tls_settings_of_mysql_arrive_flat_or_nested() -> None:
    pytest.importorskip("pymysql")
    flat = make_url(address("mysql", {"ssl_ca": "/certs/ca.pem", "ssl_verify_cert": True}).url).query
    nested = make_url(address("mysql", {"ssl": {"ca": "/certs/ca.pem", "verify_cert": True}}).url).query
    assert flat == nested == {"ssl_ca": "/certs/ca.pem", "ssl_verify_cert": "true"}


def test_settings_that_nobody_knows_are_named_and_left_out() -> None:
    found = address(extra={"sslmode": "require", "colour": "red", "cursor": "dictcursor", "heartbeat_s": 1})
    assert found.unknown == ("colour",)
    assert "colour" not in found.url


def test_settings_reach_a_real_server(postgres: Database) -> None:
    found = connection_to(postgres, application_name="seen from the server")
    engine = make_engine(repository_address(found, found.extra_dejson).config(pool_size=0))
    with engine.connect() as opened_connection:
        assert opened_connection.execute(text("SHOW application_name")).scalar() == "seen from the server"


def test_a_demand_for_tls_is_not_lost_on_the_way(postgres: Database) -> None:
    postgres.migrated().close()
    with (
        pytest.raises(DatabaseError, match="SSL"),
        opened(_address_of(connection_to(postgres, sslmode="verify-full", sslrootcert="/no/such/file"))),
    ):
        pass


# --- secrets -------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1))
def test_a_password_may_be_any_text(password: str) -> None:
    assert driver_arguments(address(password=password))["password"] == password
    assert make_url(address("mysql", password=password).url).password == password


def test_a_login_and_a_database_may_be_any_text() -> None:
    arguments = driver_arguments(address(login=AWKWARD, schema=AWKWARD))
    assert (arguments["user"], arguments["dbname"]) == (AWKWARD, AWKWARD)


def test_an_awkward_password_opens_a_real_database(mysql: Database) -> None:
    literal = AWKWARD.replace("\\", "\\\\").replace("'", "\\'")
    user = f"u{abs(hash(mysql.url)) % 10**8}"
    run_sql(mysql, f"CREATE USER {user}@'127.0.0.1' IDENTIFIED BY '{literal}'")
    try:
        database = make_url(mysql.url).database
        run_sql(mysql, f"GRANT ALL ON {database}.* TO {user}@'127.0.0.1'")
        mysql.migrated().close()
        with opened(_address_of(connection_to(with_user(mysql, user, AWKWARD)))) as repository:
            assert repository.nodes.all() == []
    finally:
        run_sql(mysql, f"DROP USER {user}@'127.0.0.1'")


def test_the_password_is_in_no_repr() -> None:
    assert "secret" not in repr(address())


def test_an_unreachable_database_is_one_line_that_names_it_and_hides_the_password() -> None:
    port = free_port()
    found = address(host="127.0.0.1", port=port, password="hunter2/@x")
    with pytest.raises(DatabaseError) as caught:
        open_repository(found)
    message = str(caught.value)
    assert "\n" not in message
    assert f"127.0.0.1:{port}" in message
    assert "hunter2" not in message


# --- the schema, and the clockwork ---------------------------------------------------------------------------------


def test_the_connection_says_in_which_schema_the_tables_are(postgres_repository: JobRepository) -> None:
    schema = postgres_repository.schema
    found = connection_to(Database("postgresql", str(postgres_repository.engine.url), schema))
    with opened(_address_of(found)) as repository:
        assert repository.schema == schema
        assert repository.nodes.all() == []


def test_the_hook_may_name_another_schema_than_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    define(monkeypatch, "repo", connection(extra={"dbpartition_schema": "one"}))
    assert JobRepositoryHook("repo").address().schema == "one"
    assert JobRepositoryHook("repo", schema="two").address().schema == "two"


def test_timings_come_with_the_connection() -> None:
    found = address(extra={"heartbeat_s": 0.5, "unreachable_after_s": "2", "remove_after_s": 4})
    assert found.timings == Timings(heartbeat_s=0.5, unreachable_after_s=2.0, remove_after_s=4.0)
    assert address().timings == Timings()


# --- what is wrong, in one line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conn_type", "extra", "fields", "words"),
    [
        ("http", {}, {}, "expected a connection of type dbpartition, postgres, mysql, mariadb or sqlite, got 'http'"),
        ("", {}, {}, "expected a connection of type"),
        ("dbpartition", {"dialect": "oracle"}, {}, "with dialect 'oracle'"),
        ("sqlite", {}, {"host": "", "schema": ""}, "expected the file's path as host"),
        ("postgres", {"iam": True}, {}, "iam tokens are not supported"),
        ("postgres", {"heartbeat_s": "often"}, {}, "expected heartbeat_s to be a number, got 'often'"),
        ("postgres", {"heartbeat_s": -1}, {}, "expected heartbeat_s to be a positive number, got -1"),
        ("postgres", {"heartbeat_s": "nan"}, {}, "expected heartbeat_s to be a positive number"),
        ("postgres", {"heartbeat_s": True}, {}, "expected heartbeat_s to be a number, got True"),
        ("postgres", {"heartbeat_s": 5}, {}, "expected unreachable_after to be at least 3 x heartbeat"),
        ("postgres", {"connect_timeout": "soon"}, {}, "expected connect_timeout to be a number, got 'soon'"),
        ("postgres", {"connect_timeout": -3}, {}, "expected connect_timeout"),
        ("postgres", {"dbpartition_schema": ["jobs"]}, {}, "expected dbpartition_schema to be text, got ['jobs']"),
    ],
)
def test_what_is_wrong_with_a_connection_is_one_line_that_names_it_and_the_field(
    conn_type: str, extra: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        address(conn_type, extra, **fields)
    message = str(caught.value)
    assert message.startswith("connection 'repo'")
    assert words in message
    assert "\n" not in message
    assert "secret" not in message


def test_a_connection_that_is_not_defined_says_how_to_define_it() -> None:
    with pytest.raises(ConfigurationError, match=r"'nowhere' is not defined: .* or set AIRFLOW_CONN_NOWHERE"):
        JobRepositoryHook("nowhere").address()


def test_missing_tables_are_one_line_with_the_command_that_makes_them(fresh_database: Database) -> None:
    with pytest.raises(SchemaError, match=r"tables are missing in .*: run `dbpartition db upgrade`") as caught:
        open_repository(_address_of(connection_to(fresh_database)))
    assert "\n" not in str(caught.value)


# --- the hook ------------------------------------------------------------------------------------------------------


def test_the_hook_reads_summaries_and_results(
    database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(monkeypatch, "repo", connection_to(database))
    add_node(repository)
    launched = submit(repository, 3)
    finish_all(repository, launched.job_execution_id)

    hook = JobRepositoryHook("repo")
    assert hook.summary(launched.job_execution_id)["partitions"]["completed"] == 3
    assert [key for key, _ in hook.iter_results(launched.job_execution_id)] == ["p0", "p1", "p2"]
    assert hook.test_connection() == (True, "job repository at revision 0001, 1 live node(s)")


def test_the_test_button_says_what_is_wrong(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    define(monkeypatch, "repo", connection_to(postgres))
    works, words = JobRepositoryHook("repo").test_connection()
    assert not works
    assert "dbpartition db upgrade" in words


def _address_of(found: Connection) -> RepositoryAddress:
    return repository_address(found, found.extra_dejson)


def test_a_password_that_changes_while_a_task_runs_is_looked_up_for_the_next_connect(
    postgres: Database, postgres_repository: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a token does that lives for minutes."""

    def say(password: str) -> None:
        said = connection_to(postgres)
        said.password = password
        define(monkeypatch, "repo", said)

    def used(repository: JobRepository) -> str:
        seen: list[str] = []

        def see(_dialect: object, _record: object, _args: object, params: dict[str, Any]) -> None:
            seen.append(params["password"])

        event.listen(repository.engine, "do_connect", see)
        repository.nodes.clock()
        event.remove(repository.engine, "do_connect", see)
        return seen[-1]

    say("first")
    with opened(JobRepositoryHook("repo").address(), pool_size=0) as repository:
        assert used(repository) == "first"
        say("second")
        assert used(repository) == "first", "what was just looked up is believed for a moment"
        monkeypatch.setattr(hooks, "FRESH_FOR_S", 0.0)
        assert used(repository) == "second"
        monkeypatch.delenv("AIRFLOW_CONN_REPO")
        assert used(repository) == "first", "where Airflow does not answer, what was known may still do"
