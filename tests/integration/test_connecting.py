"""What reaches the server of a URL: driver settings, and passwords of any letters."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import make_engine
from tests.databases import Database


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
