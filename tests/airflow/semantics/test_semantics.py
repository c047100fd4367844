"""Every cell of the table of clicks, on a real Airflow with real workers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.airflow.deployment import Deployment, assert_nothing_was_done_twice
from tests.airflow.semantics.cells import Case, cases
from tests.airflow.semantics.table import TABLE
from tests.airflow.semantics.tales import Tales, cases_of
from tests.airflow.stories import Stories

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc").exists(), reason="the tasks' processes are found through /proc"),
]

ALL = os.environ.get("DBPARTITION_SEMANTICS") == "all"


def each(some: Iterable[Case]) -> pytest.MarkDecorator:
    """One test for each case; only the essential ones unless all are asked for."""
    skipped = pytest.mark.skip(reason="`make semantics` runs it (DBPARTITION_SEMANTICS=all)")
    chosen = [pytest.param(case, id=case.id, marks=[] if ALL or case.cell.essential else [skipped]) for case in some]
    return pytest.mark.parametrize("case", chosen)


@pytest.fixture(scope="module")
def tales(request: pytest.FixtureRequest, deployment: Deployment) -> Tales:
    return Tales(deployment, cases_of(request.session.items))


@each(cases(TABLE, harmed=False))
def test_the_table_says_what_happens(case: Case, stories: Stories) -> None:
    stories.result(case)


@each(cases(TABLE, harmed=True))
def test_the_table_says_what_happens_when_airflow_itself_is_harmed(case: Case, tales: Tales) -> None:
    tales.result(case)


def test_nothing_was_ever_done_twice_and_nothing_succeeded_over_a_failure(deployment: Deployment) -> None:
    """The last of all."""
    assert_nothing_was_done_twice(deployment)
