"""docker-compose.yaml: its wiring."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.files import ROOT, compose, dockerfile, services
from tests.docs import commands

AIRFLOW = ("airflow-migrate", "api-server", "scheduler", "dag-processor", "triggerer")
OURS = ("dbpartition-upgrade", "worker")


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Target -> source of each volume."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service.get("volumes", [])}


def test_there_are_postgres_airflow_and_workers() -> None:
    assert set(services()) == {"postgres", *AIRFLOW, *OURS}
    assert services()["postgres"]["image"] == "postgres:16"


def test_one_image_for_all_of_airflow_and_one_for_the_workers() -> None:
    for names in (AIRFLOW, OURS):
        images = {services()[name]["image"] for name in names}
        files = {services()[name]["build"]["dockerfile"] for name in names}
        assert len(images) == len(files) == 1
        assert (ROOT / files.pop()).is_file()


def test_airflow_components_share_secrets_and_databases() -> None:
    environments = [services()[name]["environment"] for name in AIRFLOW]
    assert all(environment == environments[0] for environment in environments)
    for name in ("AIRFLOW__API_AUTH__JWT_SECRET", "AIRFLOW__API__SECRET_KEY", "AIRFLOW__CORE__FERNET_KEY"):
        assert len(environments[0][name]) >= 24


def test_airflow_and_the_workers_mean_the_same_job_repository() -> None:
    connection = services()["scheduler"]["environment"]["AIRFLOW_CONN_DBPARTITION_DEFAULT"]
    urls = {services()[name]["environment"]["DBPARTITION_DATABASE_URL"] for name in OURS}
    assert urls == {connection}
    assert not connection.endswith("/airflow"), "Airflow's metadata database is not for workers"


def test_nothing_starts_before_what_it_needs() -> None:
    def needs(name: str) -> dict[str, str]:
        return {other: how["condition"] for other, how in services()[name]["depends_on"].items()}

    for name in ("airflow-migrate", "dbpartition-upgrade"):
        assert needs(name) == {"postgres": "service_healthy"}
        assert services()[name]["restart"] == "no"
    for name in ("api-server", "scheduler", "dag-processor", "triggerer"):
        assert needs(name)["airflow-migrate"] == "service_completed_successfully"
        assert needs(name)["dbpartition-upgrade"] == "service_completed_successfully"
    assert needs("scheduler")["api-server"] == "service_healthy"
    assert needs("worker") == {"dbpartition-upgrade": "service_completed_successfully"}
    for name in ("postgres", "api-server", "scheduler", "dag-processor", "triggerer", "worker"):
        assert services()[name]["healthcheck"]["test"][0] == "CMD"


def test_workers_can_be_scaled_and_stopped_in_peace() -> None:
    worker = services()["worker"]
    assert "container_name" not in worker
    assert "ports" not in worker
    assert seconds(worker["stop_grace_period"]) >= float(worker["environment"]["DBPARTITION_GRACE"]) + 20
    port = worker["environment"]["DBPARTITION_HEALTH_PORT"]
    assert f":{port}/livez" in worker["healthcheck"]["test"][-1]


def test_the_workers_steps_are_mounted_where_the_image_looks_for_them() -> None:
    worker = services()["worker"]
    image = dockerfile("worker")
    source = ROOT / mounts(worker)[image.workdir]
    assert (source / f"{worker['environment']['DBPARTITION_IMPORT']}.py").is_file()


def test_mounted_files_are_there_and_volumes_declared() -> None:
    declared = set(compose()["volumes"])
    for name, service in services().items():
        for source in mounts(service).values():
            there = (ROOT / source).is_dir() if source.startswith("./") else source in declared
            assert there, f"{name}: {source}"


def test_every_variable_of_ours_is_one_that_a_worker_reads() -> None:
    for name, service in services().items():
        ours = {variable for variable in service.get("environment", {}) if variable.startswith("DBPARTITION_")}
        assert ours <= commands.environment_variables(), name


def test_every_command_of_ours_can_be_read() -> None:
    assert commands.parse(services()["worker"]["command"]) == "worker"
    assert commands.parse(services()["dbpartition-upgrade"]["command"]) == "db upgrade"


def test_only_the_user_interface_is_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"api-server": ["127.0.0.1:8080:8080"]}


@pytest.mark.airflow
def test_every_setting_of_airflow_is_one_that_it_has() -> None:
    from airflow.configuration import conf

    for variable in services()["scheduler"]["environment"]:
        if variable.startswith("AIRFLOW__"):
            section, option = variable.removeprefix("AIRFLOW__").lower().split("__")
            assert option in conf.configuration_description[section]["options"], variable


@pytest.mark.airflow
def test_every_airflow_command_can_be_read() -> None:
    from airflow.cli.cli_parser import get_parser

    parser = get_parser()
    for service in services().values():
        for words in (service.get("command", []), service.get("healthcheck", {}).get("test", ["CMD"])[1:]):
            if words[:1] == ["airflow"]:
                parser.parse_args(words[1:])  # exits where it cannot
