"""The records of the nightly batch: which are valid, and that a mark is only given to what is pending."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select

from airflow_dbpartition.demo import records as module
from airflow_dbpartition.demo.records import (
    RecordsChangedError,
    invalid_reason,
    main,
    make_records,
    pending,
    records,
    settle,
)

DAY = date(2026, 11, 2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/records.db")
    yield engine
    engine.dispose()


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(records).order_by(records.c.id)).all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"account": ""}, "no account"),
        ({"account": " \t"}, "no account"),
        ({"cents": 0}, "0 cents is no amount"),
        ({"cents": -1}, "-1 cents is no amount"),
        ({"currency": "EURO"}, "'EURO' is no currency"),
        ({"currency": "eur"}, "'eur' is no currency"),
        ({"currency": "EUR\n"}, "'EUR\\n' is no currency"),
    ],
)
def test_an_invalid_record_has_a_reason(changes: dict[str, Any], reason: str | None) -> None:
    record = SimpleNamespace(**{"account": "a", "cents": 1, "currency": "EUR", **changes})
    assert invalid_reason(record) == reason


def test_the_table_is_made_and_filled_from_the_command_line(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBPARTITION_DATABASE_URL", f"sqlite:///{tmp_path}/records.db")
    main(["2026-11-02", "3"])
    main(["2026-11-03", "2"])
    assert [(row.reference_date.day, row.status) for row in rows(engine)] == [(2, "PENDING")] * 3 + [(3, "PENDING")] * 2
    assert all(invalid_reason(row) is None for row in rows(engine))


def test_only_what_is_pending_of_the_date_and_between_the_ids_is_read(engine: Engine) -> None:
    make_records(engine, DAY, 6, changes={2: {"status": "PUBLISHED"}, 3: {"reference_date": date(2026, 11, 1)}})
    with engine.connect() as connection:
        assert [row.id for row in connection.execute(pending(DAY, 2, 5))] == [2, 5]


def test_a_mark_is_given_with_its_reason_and_a_time(engine: Engine) -> None:
    make_records(engine, DAY, 4)
    with engine.begin() as connection:
        settle(connection, "PUBLISHED", {1: None, 2: None})
        settle(connection, "INVALID", {3: "x" * 900})
        settle(connection, "REFUSED", {})
    assert [(row.status, row.settled_time is not None) for row in rows(engine)] == [
        ("PUBLISHED", True),
        ("PUBLISHED", True),
        ("INVALID", True),
        ("PENDING", False),
    ]
    assert [row.reason for row in rows(engine)] == [None, None, "x" * module.REASON_CHARS, None]


def test_a_mark_for_what_is_not_pending_any_more_is_an_error(engine: Engine) -> None:
    make_records(engine, DAY, 3, changes={1: {"status": "INVALID", "reason": "by hand"}})
    with pytest.raises(RecordsChangedError, match="1 of 3 records were settled by somebody else"), engine.begin() as on:
        settle(on, "PUBLISHED", dict.fromkeys((1, 2, 3)))
    assert [row.status for row in rows(engine)] == ["PENDING", "INVALID", "PENDING"]
