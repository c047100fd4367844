"""Airflow in another process, with a home and a DAG folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from airflow_dbpartition.demo.stage import dags_folder

ROOT = Path(__file__).resolve().parents[2]


def environment_of(home: Path, dags: Path) -> dict[str, str]:
    """Variables for the process; nothing of Airflow or dbpartition comes from this one's.

    Args:
        home: Airflow's.
        dags: its DAG folder.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW_", "DBPARTITION_"))}
    return {
        **kept,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "PYTHONPATH": str(ROOT),
    }


def run_fresh(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with the project's own DAGs; wait for its end."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment_of(home, dags_folder()),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
