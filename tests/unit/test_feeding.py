"""How many claims wait in a worker for a slot, and for how long."""

from __future__ import annotations

import pytest

from airflow_dbpartition.domain import Claim
from airflow_dbpartition.worker.feeding import Feed, key_of
from tests.unit.claims import a_claim


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def feed(clock: Clock, *, slots: int = 10, prefetch: int = 0, runs: int = 0, seconds: float = 0.0) -> Feed:
    made = Feed(slots, prefetch, clock)
    for _ in range(runs):
        made.ran(seconds)
    return made


def claims(number: int) -> list[Claim]:
    return [a_claim(step_execution_id=index) for index in range(number)]


@pytest.mark.parametrize(
    ("runs", "seconds", "wanted"),
    [(0, 0.0, 0), (19, 0.001, 0), (20, 0.0, 100), (20, 0.004, 50), (20, 0.1, 2), (20, 1.0, 0)],
)
def test_as_many_wait_as_the_slots_run_through_while_others_are_fetched(
    clock: Clock, runs: int, seconds: float, wanted: int
) -> None:
    assert feed(clock, runs=runs, seconds=seconds).wanted == pytest.approx(wanted, abs=1)


def test_a_single_long_partition_ends_the_feeding(clock: Clock) -> None:
    one = feed(clock, runs=100, seconds=0.001)
    assert one.wanted > 50
    one.ran(60.0)
    assert one.wanted == 0


def test_what_is_asked_for_waits_in_any_case(clock: Clock) -> None:
    one = feed(clock, prefetch=3)
    assert one.wanted == 3
    for claim in claims(3):
        one.add(claim)
    clock.now = 1000.0
    assert one.withdraw_overdue() == []
    assert len(one) == 3


def test_what_was_taken_in_the_hope_of_short_ones_is_given_back_when_they_are_not(clock: Clock) -> None:
    one = feed(clock, prefetch=1, runs=100, seconds=0.001)
    given = claims(3)
    for claim in given:
        one.add(claim)
    clock.now = 0.4
    assert one.withdraw_overdue() == []
    clock.now = 0.6
    assert one.withdraw_overdue() == [key_of(claim) for claim in given[1:]]
    assert one.wanted == 1, "it must not take them again at once"
    assert len(one) == 1


def test_they_are_run_in_the_order_in_which_they_came(clock: Clock) -> None:
    one = feed(clock)
    given = claims(3)
    for claim in given:
        one.add(claim)
    assert one.remove(key_of(given[1]))
    assert not one.remove(key_of(given[1]))
    assert [one.take(), one.take(), one.take()] == [given[0], given[2], None]
