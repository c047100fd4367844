"""Tales: tests that need a shared process harmed in the middle. All cells of one row are told around the same harms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.airflow.deployment import Deployment
from tests.airflow.semantics.cells import Case, Row


class Tales:
    """Tells a row when the first of its cells is asked for; what went wrong is raised in the cell's own test."""

    def __init__(self, deployment: Deployment, cases: Iterable[Case]) -> None:
        self._deployment = deployment
        self._cases = list(cases)
        self._errors: dict[Row, dict[Case, BaseException]] = {}

    def result(self, case: Case) -> None:
        if case.row not in self._errors:
            self._errors[case.row] = self._tell(case.row)
        error = self._errors[case.row].get(case)
        if error is not None:
            raise error

    def _tell(self, row: Row) -> dict[Case, BaseException]:
        tales: dict[Case, Iterator[None]] = {
            case: case.begin(self._deployment) for case in self._cases if case.row is row
        }
        errors: dict[Case, BaseException] = {}
        with ThreadPoolExecutor(len(tales), thread_name_prefix="tale") as pool:
            for harm in (*row.harms, None):
                is_last = harm is None
                told = {
                    case: pool.submit(_tell_on, tale, is_last) for case, tale in tales.items() if case not in errors
                }
                errors |= {case: error for case, part in told.items() if (error := part.exception()) is not None}
                if harm is None:
                    break
                try:
                    harm(self._deployment)  # also when nobody is left: a later one repairs what an earlier one broke
                except Exception as error:  # noqa: BLE001 - raised in the tests of the row
                    errors |= {case: error for case in tales if case not in errors}
        return errors


def _tell_on(tale: Iterator[None], is_last: bool) -> None:
    """Up to the next harm, or to the end; a tale that miscounts the harms would prove something else."""
    try:
        next(tale)
    except StopIteration:
        assert is_last, "the tale has ended before the last harm"
    else:
        assert not is_last, "the tale goes on after the last harm"


def cases_of(items: Iterable[pytest.Item]) -> list[Case]:
    """The cells that the collected tests tell, without those that are skipped."""
    chosen = [item for item in items if isinstance(item, pytest.Function) and "tales" in item.fixturenames]
    cases: list[Any] = [item.callspec.params["case"] for item in chosen if item.get_closest_marker("skip") is None]
    return cases
