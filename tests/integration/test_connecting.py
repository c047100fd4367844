"""What reaches the server of a URL: driver settings, and passwords of any letters."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Connection, make_url

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import make_engine
from airflow_dbpartition.repository.transactions import Transactions
from tests.databases import Database, run_sql


def test_settings_in_the_url_win_over_our_own(postgres: Database) -> None:
    url = make_url(postgres.url).update_query_dict({"keepalives_idle": "77", "application_name": "mine"})
    engine = make_engine(DatabaseConfig(url=url.render_as_string(hide_password=False)))
    with engine.connect() as connection:
        driver_connection: Any = connection.connection.driver_connection
        settings = driver_connection.info.dsn_parameters
    engine.dispose()
    assert (settings["keepalives_idle"], settings["application_name"]) == ("77", "mine")
    assert settings["keepalives_count"] == "3", "ours, where the URL is silent"


@pytest.mark.parametrize("password", ["pässwörd", "пароль", "p@ss/w:rd%41"])
def test_a_password_on_mysql_may_have_any_letters(mysql: Database, password: str) -> None:
    user = f"dbpartition_{secrets.token_hex(4)}"
    admin = mysql.plain_engine()
    quoted = password.replace("'", "''")
    with admin.begin() as connection:
        connection.exec_driver_sql(f"CREATE USER '{user}'@'%%' IDENTIFIED BY '{quoted}'".replace("%4", "%%4"))
        connection.exec_driver_sql(f"GRANT SELECT ON `{make_url(mysql.url).database}`.* TO '{user}'@'%%'")
    try:
        url = make_url(mysql.url).set(username=user, password=password)
        engine = make_engine(DatabaseConfig(url=url.render_as_string(hide_password=False)))
        with engine.connect() as connection:
            assert str(connection.execute(text("SELECT current_user()")).scalar()).startswith(user)
        engine.dispose()
    finally:
        with admin.begin() as connection:
            connection.exec_driver_sql(f"DROP USER '{user}'@'%%'")
        admin.dispose()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_session_that_ends_right_after_its_last_answer_takes_nothing_back(postgres: Database, atomic: bool) -> None:
    engine = make_engine(postgres.config(pool_size=1))
    transactions = Transactions(engine)

    def work(connection: Connection) -> int:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        if atomic:
            connection.commit()
        run_sql(postgres, f"SELECT pg_terminate_backend({pid})")
        return 42

    assert transactions.run(work, repeatable=False, atomic=atomic) == 42
    assert transactions.run(lambda connection: connection.execute(text("SELECT 1")).scalar_one(), atomic=atomic) == 1
    engine.dispose()


def test_isolation_is_read_committed_whatever_the_session_says_and_leaves_no_trace(postgres: Database) -> None:
    strict = make_url(postgres.url).update_query_dict({"options": "-c default_transaction_isolation=serializable"})
    engine = make_engine(DatabaseConfig(url=strict.render_as_string(hide_password=False), pool_size=1))
    transactions = Transactions(engine)
    said = text("SELECT current_setting('transaction_isolation'), current_setting('default_transaction_isolation')")

    def look(connection: Connection) -> tuple[str, str]:
        is_now, by_default = connection.execute(said).one()
        return (is_now, by_default)

    for atomic in (False, True, False):
        assert transactions.run(look, atomic=atomic) == ("read committed", "serializable")
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        assert look(connection)[0] == "repeatable read"  # what a user asks for in so many words
    engine.dispose()
