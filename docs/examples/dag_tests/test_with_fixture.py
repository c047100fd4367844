"""The local worker as a fixture: each test has a job repository of its own."""

from __future__ import annotations

# [start fixture]
from collections.abc import Iterator
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag

from airflow_dbpartition.testing import LocalJobRepository, local_worker


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[LocalJobRepository]:
    with local_worker(tmp_path, imports=["greetings"]) as jobs:
        yield jobs


def test_everybody_is_greeted_once(jobs: LocalJobRepository) -> None:
    run = DagBag().dags["tutorial_greetings"].test()
    assert run.state == "success", jobs.report()
    assert sorted(jobs.results()) == ["Ada", "Edsger", "Grace"]


# [end fixture]
