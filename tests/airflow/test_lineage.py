"""What OpenLineage is told of a job: by the real provider where it is installed, and else by the names that it has."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException

from airflow_dbpartition.operators import StopJobExecutionOperator
from airflow_dbpartition.repository import JobRepository
from tests.airflow.own_airflow import run_fresh
from tests.airflow.test_tries import execute, operator, sensor, waiting
from tests.airflow.worlds import Try
from tests.scenarios import add_node, fail_all, finish_all

FACET = "dbpartition_jobExecution"


class _Facet(SimpleNamespace):
    def with_additional_properties(self, **properties: Any) -> _Facet:
        return _Facet(**vars(self), **properties)


@pytest.fixture(autouse=True)
def provider(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("openlineage") is not None:
        return
    modules: dict[str, dict[str, Any]] = {
        "airflow.providers.openlineage": {},
        "airflow.providers.openlineage.extractors": {"OperatorLineage": SimpleNamespace},
        "openlineage": {},
        "openlineage.client": {},
        "openlineage.client.facet_v2": {"RunFacet": _Facet},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def told(task: Any, *names: str) -> Any:
    """These properties of the facet; None where there is none."""
    lineage = task.get_openlineage_facets_on_complete(Try())
    if lineage is None:
        return None
    (facet,) = lineage.run_facets.values()
    assert list(lineage.run_facets) == [FACET]
    return tuple(getattr(facet, name) for name in names)


def test_a_task_that_only_plans_names_the_execution(connected: JobRepository) -> None:
    plan = operator()
    planned = execute(plan, Try())
    assert told(plan, "job_execution_id", "job_name") == (planned, "dag.task")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_task_that_waits_tells_the_counts_too(connected: JobRepository, resumed: bool) -> None:
    add_node(connected)
    this = Try()
    planned = execute(operator(), this)
    finish_all(connected, planned)
    for task in (sensor(planned), waiting()):
        if resumed:
            task.execute_complete(this.context(), {"message": "", "job_execution_id": planned})
        else:
            execute(task, this.retried())
        assert told(task, "job_execution_id", "job_name", "status") == (planned, "dag.task", "COMPLETED")
        (counts,) = told(task, "partitions")
        assert (counts["completed"], counts["total"]) == (2, 2)


def test_a_task_that_fails_tells_what_failed(connected: JobRepository) -> None:
    add_node(connected)
    planned = execute(operator(), Try())
    fail_all(connected, planned)
    wait = sensor(planned)
    with pytest.raises(AirflowException):
        execute(wait, Try(task_id="wait"))
    (counts,) = told(wait, "partitions")
    assert (told(wait, "job_execution_id", "status"), counts["failed"]) == ((planned, "FAILED"), 2)


def test_a_task_that_stops_a_job_names_it(connected: JobRepository) -> None:
    planned = execute(operator(), Try())
    stop = StopJobExecutionOperator(
        task_id="stop", job_execution_id=planned, reason="enough", repository_conn_id="repo"
    )
    execute(stop, Try(task_id="stop"))
    assert told(stop, "job_execution_id", "job_name", "status") == (planned, "dag.task", "STOPPED")


def test_a_task_that_has_not_come_to_know_a_job_tells_nothing(connected: JobRepository) -> None:
    assert told(operator()) is None
    with pytest.raises(AirflowException):
        execute(missing := sensor(99), Try())
    assert told(missing) is None


def test_telling_asks_no_database(connected: JobRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = execute(plan := operator(), Try())
    monkeypatch.delenv("AIRFLOW_CONN_REPO")
    assert told(plan, "job_execution_id") == (planned,)


def test_nothing_of_openlineage_is_imported_for_it_before_it_asks(tmp_path: Path) -> None:
    code = """
import sys
import airflow_dbpartition.operators, airflow_dbpartition.sensors
heavy = ("openlineage", "airflow.providers.openlineage.extractors")
print([name for name in sys.modules if name.startswith(heavy)])
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
