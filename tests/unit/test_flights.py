"""The demo's rules in Python: what is rejected, what is summed, in which order it is written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import pytest
from sqlalchemy.engine import make_url

from airflow_dbpartition.demo.flights import rejection_reason, rejects, summarise, upsert_totals


@dataclass(frozen=True)
class Flight:
    id: int = 1
    carrier: str = "UA"
    flight_date: date = date(2013, 1, 1)
    tailnum: str | None = "N1"
    dep_delay: int | None = 2
    distance: int | None = 100


def test_a_flight_with_tail_number_and_distance_is_valid() -> None:
    assert rejection_reason(Flight()) is None


def test_a_cancelled_flight_is_valid() -> None:
    assert rejection_reason(Flight(dep_delay=None)) is None


def test_a_flight_without_tail_number_is_rejected() -> None:
    assert rejection_reason(Flight(tailnum=None)) == "no tail number"


@pytest.mark.parametrize("distance", [None, 0, -1])
def test_a_flight_that_goes_nowhere_is_rejected(distance: int | None) -> None:
    assert rejection_reason(Flight(distance=distance)) == "no distance"


def test_totals_are_summed_per_carrier_and_day_without_the_rejected() -> None:
    rows = [
        Flight(id=1, carrier="UA", dep_delay=-3, distance=10),
        Flight(id=2, carrier="UA", dep_delay=None, distance=20),
        Flight(id=3, carrier="UA", tailnum=None, distance=40),
        Flight(id=4, carrier="AA", flight_date=date(2013, 1, 2), dep_delay=5, distance=80),
    ]

    assert summarise(rows) == [
        {
            "carrier": "AA",
            "flight_date": date(2013, 1, 2),
            "flights": 1,
            "cancelled": 0,
            "dep_delay_minutes": 5,
            "distance": 80,
        },
        {
            "carrier": "UA",
            "flight_date": date(2013, 1, 1),
            "flights": 2,
            "cancelled": 1,
            "dep_delay_minutes": -3,
            "distance": 30,
        },
    ]
    assert rejects(rows) == [{"flight_id": 3, "reason": "no tail number"}]


def test_nothing_in_gives_nothing_out() -> None:
    assert summarise([]) == []
    assert rejects([]) == []


def test_totals_are_written_in_the_order_of_their_key_whatever_order_they_come_in() -> None:
    totals = summarise([Flight(carrier=carrier) for carrier in ("AA", "MQ", "UA")])

    statement = upsert_totals(list(reversed(totals)), job_instance_id=1).compile(
        dialect=make_url("postgresql+psycopg2://").get_dialect()()
    )

    written = [value for name, value in statement.params.items() if name.startswith("carrier")]
    assert written == ["AA", "MQ", "UA"]
    assert "ON CONFLICT (job_instance_id, carrier, flight_date) DO UPDATE SET" in str(statement)


def test_an_upsert_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one row of totals, got none"):
        upsert_totals([], job_instance_id=1)
