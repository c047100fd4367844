"""What people are shown first of a failure."""

from __future__ import annotations

import traceback

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from airflow_dbpartition.failure_texts import essence, headline


def of_sqlalchemy() -> str:
    engine = create_engine("sqlite://")
    with pytest.raises(OperationalError) as caught, engine.connect() as connection:
        connection.execute(text("SELECT * FROM nope"))
    engine.dispose()
    return "".join(traceback.format_exception(caught.value))


def test_of_an_sql_error_the_error_is_named_and_not_the_link_below_it() -> None:
    told = of_sqlalchemy()
    assert told.rstrip().splitlines()[-1].startswith("(Background")
    assert headline(told) == "sqlalchemy.exc.OperationalError: (sqlite3.OperationalError) no such table: nope"
    assert essence(told, lines=3)[1:] == ["[SQL: SELECT * FROM nope]"]


def test_of_chained_errors_the_last_counts() -> None:
    def chained() -> None:
        try:
            int("x")
        except ValueError as error:
            raise RuntimeError("no number\nin line 3") from error

    with pytest.raises(RuntimeError) as caught:
        chained()
    told = "".join(traceback.format_exception(caught.value))
    assert headline(told) == "RuntimeError: no number"
    assert essence(told, lines=5) == ["RuntimeError: no number", "in line 3"]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (None, ""),
        ("", ""),
        ("  \n ", ""),
        ("node a was lost", "node a was lost"),
        ("first\nlast\n", "last"),
        ("Traceback (most recent call last):\n  File", "  File"),
    ],
)
def test_of_any_other_text_the_last_line_is_shown(told: str | None, shown: str) -> None:
    assert headline(told) == shown
