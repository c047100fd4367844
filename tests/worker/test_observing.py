"""What a worker shows of itself: health, metrics and logs."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import urllib.error
import urllib.request
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from airflow_dbpartition.demo.processes import free_port
from airflow_dbpartition.domain import JobSettings
from tests.worker.processes import Fleet, Node, wait_until
from tests.worker.proxy import Proxy

SECRET = "hunter2"
IDS = {"job_execution_id", "step_execution_id", "partition_key", "attempt", "version"}


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of one answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(port: int, name: str) -> float:
    """The value of one sample, 0 where there is none yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", get(port, "/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_worker_is_live_and_ready_and_says_why(postgres_fleet: Fleet) -> None:
    port = free_port()
    node = postgres_fleet.start(health_port=port)

    status, why = get(port, "/livez")
    assert status == 200
    assert why.startswith("loop turned")
    status, why = get(port, "/readyz")
    assert status == 200
    assert node.node_id in why
    assert get(port, "/")[0] == 404


def test_a_worker_that_drains_is_live_but_not_ready(postgres_fleet: Fleet) -> None:
    port = free_port()
    node = postgres_fleet.start(health_port=port)
    _job, gate = postgres_fleet.gated()
    postgres_fleet.wait_for_note("begun")
    node.send(signal.SIGTERM)
    node.says("draining")

    assert get(port, "/readyz") == (503, "draining\n")
    assert get(port, "/livez")[0] == 200
    gate.touch()
    assert node.exits() == 0


def test_a_worker_without_its_database_is_live_but_not_ready_until_it_is_back(quick_fleet: Fleet) -> None:
    port = free_port()
    with Proxy(quick_fleet.database.url) as proxy:
        quick_fleet.start(health_port=port, url=proxy.url)
        assert metric(port, "dbpartition_heartbeat_age_seconds") < 10
        proxy.cut()
        wait_until(lambda: metric(port, "dbpartition_heartbeat_age_seconds") > 2, "its heartbeat is not answered")
        assert get(port, "/readyz")[0] == 503
        assert get(port, "/livez")[0] == 200
        proxy.restore()
        wait_until(lambda: get(port, "/readyz")[0] == 200, "it is ready again")


def test_the_metrics_count_what_the_worker_has_done(postgres_fleet: Fleet) -> None:
    port = free_port()
    postgres_fleet.start(health_port=port, concurrency=2)
    assert postgres_fleet.submit(3).ends() == "COMPLETED"
    settings = JobSettings(partition_retries=1, retry_delay_s=0.01)
    assert postgres_fleet.submit(context={"do": "raise_error"}, settings=settings).ends() == "FAILED"
    _job, gate = postgres_fleet.gated()
    postgres_fleet.wait_for_note("begun", times=6)

    assert metric(port, 'dbpartition_partitions_total{outcome="completed"}') == 3
    assert metric(port, 'dbpartition_partitions_total{outcome="retried"}') == 1
    assert metric(port, 'dbpartition_partitions_total{outcome="failed"}') == 1
    assert metric(port, 'dbpartition_claims_total{how="claimed"}') == 6
    wait_until(lambda: metric(port, "dbpartition_running") == 1, "one is seen to run")
    gate.touch()


@pytest.fixture
def lines(postgres_fleet: Fleet) -> list[dict[str, Any]]:
    """The log of a worker that has run, retried, failed, lost its children and its database, and ended."""
    with Proxy(_with_password(postgres_fleet.database.url)) as proxy:
        node = postgres_fleet.start(url=proxy.url, log_format="json", log_level="debug")
        for do in ("answer", "log_a_secret", "raise_error", "kill_itself", "return_nan"):
            postgres_fleet.submit(context={"do": do}).ends()
        settings = JobSettings(partition_retries=1, retry_delay_s=0.01)
        postgres_fleet.submit(context={"do": "raise_error"}, settings=settings).ends()
        proxy.cut()
        node.says("heartbeat failed")
        proxy.restore()
        node.says("heartbeat is answered again")
        node.send(signal.SIGTERM)
        assert node.exits() == 0
    return [_json_of(line, node) for line in node.log.splitlines()]


def test_every_line_of_a_json_log_is_json_with_ids_and_without_secrets(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert {"event", "level", "timestamp"} <= set(line), line
        assert SECRET not in json.dumps(line)
        if str(line["event"]).startswith("partition "):
            assert set(line) >= IDS, line
        if str(line["event"]).startswith(("node ", "heartbeat ", "partition claimed", "draining")):
            assert "node_id" in line, line
    assert "fields masked" in {line["event"] for line in lines}
    (traced,) = [line for line in lines if "exception" in line]
    assert "ConnectionError" in traced["exception"]
    events = {line["event"] for line in lines}
    assert {
        "node registered",
        "partition claimed",
        "partition completed",
        "partition retried",
        "partition failed",
        "a child process died",
        "connecting",
        "job execution ended",
        "heartbeat failed",
        "node left",
    } <= events
    (said_by_step,) = [line for line in lines if line["event"] == "connecting"]
    assert set(said_by_step) >= IDS | {"node_id"}
    assert said_by_step["target"] == "postgresql://reader:***@warehouse/flights"


def test_what_a_step_says_by_the_standard_library_carries_the_ids_too(lines: list[dict[str, Any]]) -> None:
    (said_by_driver,) = [line for line in lines if str(line["event"]).startswith("cannot reach ")]
    assert set(said_by_driver) >= IDS | {"node_id"}
    (settled,) = [
        line
        for line in lines
        if line["event"] == "partition failed"
        and line["partition_key"] == said_by_driver["partition_key"]
        and line["job_execution_id"] == said_by_driver["job_execution_id"]
    ]
    assert settled["step_execution_id"] == said_by_driver["step_execution_id"]


def test_a_probe_that_hangs_up_or_says_nothing_is_no_news(postgres_fleet: Fleet) -> None:
    port = free_port()
    node = postgres_fleet.start(health_port=port)
    silent = socket.create_connection(("127.0.0.1", port))
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as probe:
            probe.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # hang up by a reset

    assert get(port, "/livez")[0] == 200
    silent.settimeout(30)
    assert silent.recv(1) == b""  # the worker has hung up
    assert "Traceback" not in node.log
    assert "Exception" not in node.log


def test_a_log_for_the_console_shows_no_secrets_either(postgres_fleet: Fleet) -> None:
    node = postgres_fleet.start(url=_with_password(postgres_fleet.database.url))
    postgres_fleet.submit(context={"do": "log_a_secret"}).ends()
    node.says("partition failed")

    assert "connecting" in node.log
    assert "Traceback" in node.log
    assert SECRET not in node.log


def _with_password(url: str) -> str:
    """The server trusts us, and does not mind a password."""
    return make_url(url).set(password=SECRET).render_as_string(hide_password=False)


def _json_of(line: str, node: Node) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        raise AssertionError(f"not JSON: {line!r} in\n{node.log}") from None
    assert isinstance(value, dict)
    return value
