"""Whose an execution is: by ids and counts that Airflow gives each try, and by nothing that is remembered."""

from __future__ import annotations

import pytest

from airflow_dbpartition.ownership import describe, map_index_of, owner_token, same_run, was_cleared
from tests.airflow.worlds import Try


def test_each_try_has_a_token_of_its_own() -> None:
    first = Try(max_tries=1)
    assert owner_token(first) == owner_token(first)
    assert len({owner_token(first), owner_token(first.retried()), owner_token(first.cleared())}) == 3


def test_a_run_is_known_by_dag_and_run_together() -> None:
    stored = describe(Try(), retries=0)
    assert same_run(stored, Try(task_id="another"))
    assert not same_run(stored, Try(run_id="another"))
    assert not same_run(stored, Try(dag_id="another"))
    assert not same_run({}, Try())


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_no_clear_and_each_clear_is_one(retries: int) -> None:
    launched = Try(max_tries=retries)
    stored = describe(launched, retries=retries)
    assert not was_cleared(stored, launched, retries=retries)

    retried = launched
    for _ in range(retries):
        retried = retried.retried()
        assert not was_cleared(stored, retried, retries=retries)

    cleared = retried.cleared(retries=retries)
    assert was_cleared(stored, cleared, retries=retries)
    again = describe(cleared, retries=retries)
    assert not was_cleared(again, cleared, retries=retries)
    assert was_cleared(again, cleared.cleared(retries=retries), retries=retries)


def test_a_clear_before_the_retries_are_spent_is_seen() -> None:
    launched = Try(max_tries=2)
    stored = describe(launched, retries=2)
    assert was_cleared(stored, launched.cleared(retries=2), retries=2)


def test_fewer_retries_in_a_new_version_of_the_dag_are_no_clear() -> None:
    stored = describe(Try(max_tries=5), retries=5)
    assert not was_cleared(stored, Try(try_number=2, max_tries=1), retries=1)


def test_where_another_task_wrote_it_only_the_first_try_after_a_clear_counts() -> None:
    by_operator = describe(Try(task_id="plan"), retries=0)
    sensor = Try(task_id="wait", max_tries=1)
    assert not was_cleared(by_operator, sensor, retries=1)
    assert not was_cleared(by_operator, sensor.retried(), retries=1)
    cleared = sensor.retried().cleared(retries=1)
    assert was_cleared(by_operator, cleared, retries=1)
    assert not was_cleared(by_operator, cleared.retried(), retries=1)


def test_a_mapped_task_is_not_mistaken_for_its_sibling() -> None:
    stored = describe(Try(map_index=0, max_tries=0), retries=0)
    sibling = Try(map_index=1, try_number=1, max_tries=4)
    assert not was_cleared(stored, sibling, retries=4)


def test_the_description_leads_to_the_task_in_the_ui() -> None:
    described = describe(Try("my dag", "manual__2026-01-01T00:00:00+00:00", "group.task"), retries=0)
    assert described["link"] == "/dags/my%20dag/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/group.task"
    assert describe(Try(map_index=3), retries=0)["link"].endswith("/mapped/3")
    assert map_index_of(Try(map_index=None)) == -1
