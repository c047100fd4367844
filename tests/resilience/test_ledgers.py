"""The verdict over the ledgers: each broken promise is seen."""

from __future__ import annotations

from collections import Counter

import pytest

from airflow_dbpartition.domain import TransferPolicy
from tests.resilience.ledgers import Entry, Row, judge


def row(status: str = "COMPLETED", policy: str = "always", units: int = 2) -> Row:
    return Row(7, "p0", "key", status, TransferPolicy(policy), 1, units, 2, "node-1", "")


def outside(*what: str) -> list[Entry]:
    return [Entry(one, "key", 1, "node-1", 100) for one in what]


TWO = Counter({("key", 0): 1, ("key", 1): 1})


@pytest.mark.parametrize(
    ("rows", "inside", "entries", "fault"),
    [
        ([row()], TWO, outside("entered", "done"), None),
        ([row()], TWO, outside("entered", "entered", "done"), None),
        ([row("FAILED", "never", 1)], Counter({("key", 0): 1}), outside("entered"), None),
        ([row("FAILED", "never", 0)], Counter(), [], None),
        ([row("CLAIMED")], TWO, outside("entered"), "is not at its end"),
        ([row()], TWO + TWO, outside("entered", "done"), "says 2 units"),
        ([row()], Counter({("key", 1): 1}), outside("entered", "done"), "says 2 units"),
        ([row(units=1)], Counter({("key", 0): 1}), outside("entered", "done"), "is COMPLETED with 1 of 2 units"),
        ([row()], TWO, outside("entered"), "the ledger outside does not know it"),
        ([row(policy="until_started")], TWO, outside("entered", "entered", "done"), "was entered 2 times"),
        ([], TWO, outside("entered", "done"), "unknown partition"),
    ],
)
def test_the_verdict_names_the_promise_that_was_broken(
    rows: list[Row], inside: Counter[tuple[str, int]], entries: list[Entry], fault: str | None
) -> None:
    faults = judge(rows, inside, entries).faults
    assert (faults == []) if fault is None else (len(faults) == 1 and fault in faults[0])
