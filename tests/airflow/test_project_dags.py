"""The DAGs of `dags/` do what they say; the others of them are run by the demo, the compose file and the tutorial."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("moto")

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.demo.stage import dags_folder
from tests.airflow.own_airflow import environment_of
from tests.airflow.project_dag_runs import MARK
from tests.worker.sns import CREDENTIALS, moto_server


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What came of each DAG, run once."""
    home = tmp_path_factory.mktemp("airflow")
    guard = Guard()
    with moto_server(tmp_path_factory.mktemp("moto"), guard) as moto:
        environment = {
            **environment_of(home, dags_folder()),
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": moto.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AIRFLOW_CONN_AWS_DEFAULT": json.dumps({"conn_type": "aws"}),
        }
        out = ""
        for arguments in (["airflow", "db", "migrate"], ["tests.airflow.project_dag_runs"]):
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                env=environment,
                cwd=home,
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
            out = done.stdout
        (told,) = [line for line in out.splitlines() if line.startswith(MARK)]
        yield json.loads(told.removeprefix(MARK))
    guard.close()


def test_all_of_them_are_read_without_errors(came: dict[str, Any]) -> None:
    assert came["import_errors"] == {}


def test_two_partitioned_steps_follow_one_another_and_the_aggregator_ranks(came: dict[str, Any]) -> None:
    found = came["punctual_carriers"]
    assert found["state"] == "success", found["report"]
    assert found["flights"] == 300
    assert found["ranking"] == [["HA", -3.0], ["UA", 4.0], ["AA", 12.0]]


def test_housekeeping_purges(came: dict[str, Any]) -> None:
    assert came["housekeeping"]["state"] == "success"
    assert came["housekeeping"]["purged"] == {"instances": 0, "executions": 0, "partitions": 0, "nodes": 0}


def test_every_line_of_every_csv_object_is_imported_once(came: dict[str, Any]) -> None:
    found = came["import_s3_files"]
    assert found["state"] == "success", found["report"]
    assert found["rows"] == [["orders/a.csv", 1203, 1203], ["orders/b.csv", 1, 1]]
    assert found["last"] == {"order": "1202", "cents": "12020"}
