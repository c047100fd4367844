"""Fixtures of the worker tests: fleets of real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.repository import JobRepository
from tests.databases import Database
from tests.worker.processes import QUICK, Fleet


@pytest.fixture(scope="session")
def guard() -> Iterator[Guard]:
    guard = Guard()
    yield guard
    guard.close()


@pytest.fixture
def fleet(database: Database, repository: JobRepository, tmp_path: Path, guard: Guard) -> Iterator[Fleet]:
    """Workers on a database of each kind in turn."""
    with Fleet(database, repository, tmp_path, guard) as fleet:
        yield fleet


@pytest.fixture
def postgres_fleet(
    postgres: Database, postgres_repository: JobRepository, tmp_path: Path, guard: Guard
) -> Iterator[Fleet]:
    """Workers on PostgreSQL."""
    with Fleet(postgres, postgres_repository, tmp_path, guard) as fleet:
        yield fleet


@pytest.fixture
def quick_fleet(
    postgres: Database, postgres_repository: JobRepository, tmp_path: Path, guard: Guard
) -> Iterator[Fleet]:
    """Workers on PostgreSQL that take each other for dead within seconds."""
    with Fleet(postgres, postgres_repository, tmp_path, guard, QUICK) as fleet:
        yield fleet
