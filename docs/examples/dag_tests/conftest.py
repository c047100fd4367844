"""An Airflow for the tests alone: an empty home, whose DAG folder is the project's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Airflow reads these when it is first imported: so here, and in no fixture.
home = tempfile.TemporaryDirectory(prefix="airflow-")
os.environ["AIRFLOW_HOME"] = home.name
os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = str(Path(__file__).resolve().parent.parent / "dags")
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, capture_output=True)
