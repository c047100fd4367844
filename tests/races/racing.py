"""Letting threads run against one another on connections of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_dbpartition.repository import JobRepository
from tests.databases import Database

_ROUNDS = float(os.environ.get("DBPARTITION_TEST_ROUNDS", "1"))
LONGEST_RACE_S = 120


def rounds(usual: int, database: Database | None = None) -> range:
    """How often a race is run: `usual` times DBPARTITION_TEST_ROUNDS (default 1); fewer where there is one writer."""
    share = 0.4 if database is not None and database.name == "sqlite" else 1.0
    return range(max(1, round(usual * _ROUNDS * share)))


def race(*runners: Callable[[], object]) -> list[Any]:
    """Start all at the same instant; what each returned or raised, in order."""
    barrier = threading.Barrier(len(runners))
    outcomes: list[Any] = [None] * len(runners)

    def run(position: int) -> None:
        barrier.wait()
        try:
            outcomes[position] = runners[position]()
        except BaseException as error:  # noqa: BLE001 - it is the outcome
            outcomes[position] = error

    threads = [threading.Thread(target=run, args=(position,), daemon=True) for position in range(len(runners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LONGEST_RACE_S)
    if any(thread.is_alive() for thread in threads):
        pytest.fail(f"a racer did not come to an end within {LONGEST_RACE_S} s")
    return outcomes


def errors(outcomes: Sequence[object], *expected: type[BaseException]) -> list[BaseException]:
    """What was raised and is not one of the expected kinds; empty in a fair race."""
    return [one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, expected)]


@contextmanager
def contestants(database: Database, count: int, **options: Any) -> Iterator[list[JobRepository]]:
    """So many repositories, each with connections of its own, as so many processes would have."""
    repositories = [JobRepository.connect(database.config(pool_size=1, **options)) for _ in range(count)]
    try:
        yield repositories
    finally:
        for repository in repositories:
            repository.close()
