"""The project's DAGs are read cleanly, and reading them touches no database and no worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_dbpartition.demo.stage import dags_folder
from tests.airflow.own_airflow import run_fresh

# Ends the process at the first connection of any kind: by socket, by libpq, to a SQLite file.
FORBID = """
import sys
import psycopg2

def audit(event, arguments):
    if event in ("socket.connect", "sqlite3.connect"):
        raise SystemExit(f"{event} {arguments[1:]}")

def connect(*arguments, **keywords):
    raise SystemExit("psycopg2.connect")

sys.addaudithook(audit)
psycopg2.connect = psycopg2._connect = connect
"""


def test_the_guard_of_these_tests_sees_each_kind_of_connection(tmp_path: Path) -> None:
    for attempt in (
        "import sqlite3; sqlite3.connect('x.db')",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import sqlalchemy; sqlalchemy.create_engine('postgresql+psycopg2://127.0.0.1:9/x').connect()",
    ):
        assert run_fresh(f"{FORBID}\n{attempt}\nprint('unseen')", tmp_path).returncode != 0


@pytest.mark.parametrize("module", ["operators", "sensors", "hooks", "provider_info"])
def test_importing_a_module_opens_no_connection(module: str, tmp_path: Path) -> None:
    code = f"{FORBID}\nimport airflow_dbpartition.{module}\nprint('imported')"
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported\n")


def test_what_a_dag_and_the_plugin_import_of_ours_is_neither_the_repository_nor_a_driver(tmp_path: Path) -> None:
    code = """
import sys
import airflow_dbpartition.operators, airflow_dbpartition.sensors, airflow_dbpartition.decorators
import airflow_dbpartition.partitioners, airflow_dbpartition.plugin
heavy = ("airflow_dbpartition.repository", "airflow_dbpartition.launching", "airflow_dbpartition.triggers")
brought = (".".join(name.split(".")[:2]) for name in sys.modules)
print([name for name in brought if name in heavy or name in ("psycopg2", "alembic", "pymysql")])
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_nothing_that_a_dag_or_the_plugin_imports_of_ours_asks_for_sqlalchemy(tmp_path: Path) -> None:
    """Airflow itself has imported it by then, in this version: so what counts is who asks."""
    code = """
import builtins
asked, real = {}, builtins.__import__

def watching(name, globals=None, locals=None, fromlist=(), level=0):
    module = (globals or {}).get("__name__", "")
    if level == 0 and module.split(".")[0] == "airflow_dbpartition":
        asked.setdefault(name.split(".")[0], []).append(module)
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = watching
import airflow_dbpartition.operators, airflow_dbpartition.sensors, airflow_dbpartition.decorators
import airflow_dbpartition.partitioners, airflow_dbpartition.plugin
print("airflow" in asked, asked.get("sqlalchemy"))
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True None"


def test_the_dags_are_read_without_errors_database_or_worker(tmp_path: Path) -> None:
    code = f"""
{FORBID}
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder={str(dags_folder())!r}, collect_dags=False)
bag.collect_dags()
print(sorted(bag.dags), bag.import_errors)
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted(path.stem for path in dags_folder().glob("*.py"))  # each file holds the DAG that it is named after
    assert {"publish_pending_records", "reconcile_flights", "tutorial_greetings"} <= set(names)
    assert done.stdout.splitlines()[-1] == f"{names} {{}}"


def test_a_wrong_argument_is_one_line_in_the_import_errors(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "from airflow.sdk import DAG\n"
        "from airflow_dbpartition.operators import PartitionedStepOperator\n"
        "with DAG('wrong'):\n"
        "    PartitionedStepOperator(task_id='cut', step='work', partitioner={}, partitions_per_node=0)\n"
    )
    code = f"""
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder={str(tmp_path)!r}, collect_dags=False)
bag.collect_dags()
(error,) = bag.import_errors.values()
print(error.strip().splitlines()[-1])
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "airflow_dbpartition.errors.ConfigurationError: "
        "task 'cut': expected partitions_per_node to be an integer of at least 1, got 0"
    )


def test_airflow_knows_the_provider_and_the_form_of_its_connections(tmp_path: Path) -> None:
    code = """
from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
known = "airflow-dbpartition" in manager.providers
manager.initialize_providers_hooks()
hook = manager.hooks["dbpartition"]
print(known, hook.hook_class_name, hook.connection_type)
"""
    done = run_fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True airflow_dbpartition.hooks.JobRepositoryHook dbpartition"
