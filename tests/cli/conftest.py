"""Fixtures of the command line's tests: `dbpartition` on a database of each kind."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.cli.running import Run, in_process, variables
from tests.databases import Database


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`dbpartition` in this process, in an environment that says nothing."""
    for name in [name for name in os.environ if name.startswith("DBPARTITION_")]:
        monkeypatch.delenv(name)
    return partial(in_process, capsys)


@pytest.fixture
def dbpartition(bare: Run, database: Database, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`dbpartition` in this process, its environment leading to this test's database."""
    for name, value in variables(database).items():
        monkeypatch.setenv(name, value)
    return bare
