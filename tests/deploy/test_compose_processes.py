"""docker-compose.yaml comes up: the services as processes, healthy, with a worker that runs the tutorial's DAG."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.demo.airflow_api import AirflowApi
from airflow_dbpartition.domain import NodeStatus
from airflow_dbpartition.repository import JobRepository
from tests.deploy.stage import Stage

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(240)]

COMPONENTS = ("scheduler", "dag_processor", "triggerer")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("compose")) as stage:
        stage.create_databases()
        stage.run("airflow-migrate")
        stage.run("dbpartition-upgrade")
        stage.start("api-server", "scheduler", "dag-processor", "triggerer", "worker")
        yield stage


@pytest.fixture(scope="module")
def repository(stage: Stage) -> Iterator[JobRepository]:
    url = stage.environment("worker")["DBPARTITION_DATABASE_URL"]
    repository = JobRepository.connect(DatabaseConfig(url=url))
    yield repository
    repository.close()


def test_the_worker_registers_and_is_ready(stage: Stage, repository: JobRepository) -> None:
    (node,) = stage.until("a node", lambda: repository.nodes.live(node_group="default", within_s=10))
    assert node.steps == ("greet",)
    assert str(node.capacity) == stage.services["worker"]["environment"]["DBPARTITION_CONCURRENCY"]
    answer = stage.until("ready", lambda: stage.get("http://127.0.0.1:8080/readyz", "worker"))
    assert answer.status_code == 200
    assert node.node_id in answer.text


def test_the_health_checks_of_postgres_and_worker_pass(stage: Stage, repository: JobRepository) -> None:
    stage.until("a node", lambda: repository.nodes.live(node_group="default", within_s=10))
    stage.run("worker", stage.services["worker"]["healthcheck"]["test"][1:])
    words = stage.services["postgres"]["healthcheck"]["test"]
    user = next(word.partition("=")[2] for word in words if word.startswith("--username"))
    database = next(word.partition("=")[2] for word in words if word.startswith("--dbname"))
    assert f"{user}:" in stage.environment("scheduler")["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    assert stage.environment("scheduler")["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].endswith(f"/{database}")


def test_every_component_of_airflow_is_healthy(stage: Stage) -> None:
    url = stage.services["api-server"]["healthcheck"]["test"][-1]

    def report() -> dict[str, Any] | None:
        answer = stage.get(url)
        if answer is None or answer.status_code != 200:
            return None
        states: dict[str, Any] = answer.json()
        return states if all(states[name]["status"] == "healthy" for name in COMPONENTS) else None

    assert stage.until("healthy", report)["metadatabase"]["status"] == "healthy"
    scheduler = stage.until("scheduler", lambda: stage.get(stage.services["scheduler"]["healthcheck"]["test"][-1]))
    assert scheduler.status_code == 200


def test_the_triggerers_health_check_passes(stage: Stage) -> None:
    test_every_component_of_airflow_is_healthy(stage)
    stage.run("triggerer", stage.services["triggerer"]["healthcheck"]["test"][1:])


def test_the_tutorials_dag_runs_on_the_worker(stage: Stage, repository: JobRepository) -> None:
    test_every_component_of_airflow_is_healthy(stage)
    with AirflowApi(stage.local("http://localhost:8080")) as api:
        api.wait_for_dag("tutorial_greetings")
        api.unpause("tutorial_greetings")
        run_id = api.trigger("tutorial_greetings")
        run = api.wait_for_run("tutorial_greetings", run_id, timeout_s=60)
        assert run["state"] == "success", api.task_log("tutorial_greetings", run_id, "greet")
        summary = api.xcom("tutorial_greetings", run_id, "greet")
    results = dict(repository.reading.iter_results(summary["job_execution_id"]))
    assert sorted(result["greeting"] for result in results.values()) == [
        "Hello, Ada!",
        "Hello, Edsger!",
        "Hello, Grace!",
    ]


def test_sigterm_makes_the_worker_leave_in_peace(stage: Stage, repository: JobRepository) -> None:
    (node,) = stage.until("a node", lambda: repository.nodes.live(node_group="default", within_s=10))
    worker = stage.processes.pop("worker")
    worker.send(signal.SIGTERM)
    assert worker.wait(timeout_s=15)
    assert worker.exit_code == 0
    (gone,) = [one for one in repository.nodes.all(include_removed=True) if one.node_id == node.node_id]
    assert gone.status is NodeStatus.REMOVED
