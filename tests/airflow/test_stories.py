"""Good ends, failures, refusals, and what Airflow shows, on a real Airflow with real workers; all side by side.

What clicks, limits and lost processes do is in `semantics`.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from airflow_dbpartition.demo.airflow_api import AirflowApiError
from airflow_dbpartition.demo.processes import SessionProcess, free_port, log_tail
from tests.airflow.deployment import (
    PASSWORD,
    PATIENCE_S,
    Deployment,
    Run,
    assert_nothing_was_done_twice,
    gated,
    summary_without_moment,
    wait_until,
)
from tests.airflow.stories import story

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]


# --- ending well ---------------------------------------------------------------------------------------------------


@story
@pytest.mark.resilience_long
def test_a_sensor_ends_with_the_same_summary_in_each_of_its_modes(deployment: Deployment) -> None:
    run = deployment.run("three_modes", "three_modes", gated(4, rows=5))
    run.wait_for("poked", "running")
    run.wait_for("rescheduled", "up_for_reschedule", "running")
    run.wait_for_trigger("deferred")
    run.open()

    assert run.ends() == "success"
    poked, rescheduled, deferred = (run.xcom(task_id) for task_id in ("poked", "rescheduled", "deferred"))
    assert poked == rescheduled == deferred
    assert poked["partitions"] == {
        "total": 4,
        "completed": 4,
        "failed": 0,
        "stopped": 0,
        "pending": 0,
        "claimed": 0,
    }
    assert poked["counters"]["write"] == 20
    assert poked["status"] == "COMPLETED"
    assert run.xcom("plan") == run.execution().job_execution_id == poked["job_execution_id"]


@story
def test_an_operator_that_waits_returns_the_summary_whether_it_blocks_or_defers(deployment: Deployment) -> None:
    run = deployment.run("both_waits", "both_waits", gated(3))
    run.wait_for("blocking", "running")
    run.wait_for_trigger("deferring")
    run.open()

    assert run.ends() == "success"
    blocking, deferring = (summary_without_moment(run.xcom(task_id)) for task_id in ("blocking", "deferring"))
    assert blocking.pop("job_name") == "both_waits.blocking"
    assert deferring.pop("job_name") == "both_waits.deferring"
    assert blocking.pop("job_execution_id") != deferring.pop("job_execution_id")
    assert blocking == deferring
    assert blocking["partitions"]["completed"] == 3


@story
def test_a_job_without_partitions_is_complete_at_once(deployment: Deployment) -> None:
    run = deployment.run("plan_then_sensor", "no_partitions", {})

    assert run.ends() == "success"
    assert run.execution().status.value == "COMPLETED"
    assert run.xcom("wait")["partitions"]["total"] == 0


@story
def test_each_mapped_task_has_a_job_of_its_own(deployment: Deployment) -> None:
    run = deployment.run("mapped", "mapped")

    assert run.ends() == "success"
    summaries = [run.xcom("wait", map_index=index) for index in (0, 1)]
    assert [summary["counters"]["write"] for summary in summaries] == [1, 110]
    assert [execution.manager["map_index"] for execution in run.executions()] in ([0, 1], [1, 0])
    assert len({execution.job_instance_id for execution in run.executions()}) == 2


# --- failing, and trying again -------------------------------------------------------------------------------------


@story
def test_a_failed_partition_fails_the_sensor_which_names_it_and_a_clear_restarts_only_it(
    deployment: Deployment,
) -> None:
    broken = {"fails": 1, "because": "row 7 has no carrier"}
    run = deployment.run("plan_then_sensor", "failed_partition", {"good": {}, "broken": broken, "fine": {}})

    assert run.ends() == "failed"
    assert run.state("plan") == "success"
    (error,) = run.errors("wait")
    failed = run.execution()
    assert f"job execution {failed.job_execution_id} (plan_then_sensor.plan) FAILED: 1 of 3 partitions failed" in error
    assert re.search(r"broken on (left|right)-\w+ \(attempt 1\):", error)
    assert error.splitlines()[-2].endswith("ValueError: row 7 has no carrier")
    assert error.endswith("runs what failed again"), "the next act"

    run.clear("wait")

    assert run.ends() == "success"
    first, second = run.executions()
    assert second.job_instance_id == first.job_instance_id
    assert (first.status.value, second.status.value) == ("FAILED", "COMPLETED")
    assert second.partition_count == 1
    assert run.begun() == {"good": 1, "broken": 2, "fine": 1}
    assert run.xcom("wait")["partitions"]["completed"] == 3


@story
def test_a_retried_sensor_restarts_what_failed_once(deployment: Deployment) -> None:
    run = deployment.run("plan_then_retrying_sensor", "sensor_retries", {"good": {}, "broken": {"fails": 9}})

    assert run.ends() == "failed"
    assert run.task("wait")["try_number"] == 2
    assert [execution.status.value for execution in run.executions()] == ["FAILED", "FAILED"]
    assert run.begun() == {"good": 1, "broken": 2}


# --- refusals ------------------------------------------------------------------------------------------------------


def only_error(run: Run, task_id: str) -> str:
    """What the failed task has raised: one error, without a chain of causes, in one line."""
    run.wait_for(task_id, "failed")
    (error,) = run.errors(task_id)
    assert "\n" not in error
    return error


@story
def test_an_unknown_step_is_refused_by_naming_the_nodes_and_their_steps(deployment: Deployment) -> None:
    error = only_error(deployment.shared_run("refusals"), "unknown_step")
    assert "no live node of group 'default' has registered the step 'never_registered'" in error
    assert re.search(r"left-\w+ knows act", error)
    assert re.search(r"right-\w+ knows act", error)


@story
def test_no_nodes_fail_refuses_when_nobody_is_there(deployment: Deployment) -> None:
    error = only_error(deployment.shared_run("refusals"), "no_nodes_fail")
    assert "no node of group 'deserted' is live: start workers (`dbpartition worker --node-group deserted" in error


@story
def test_a_wait_without_nodes_ends_in_time_and_leaves_the_partitions(deployment: Deployment) -> None:
    run = deployment.shared_run("refusals")
    assert "no live node of group 'deserted' with the step 'act' for 2 s" in only_error(run, "no_nodes_timeout")
    (execution,) = [one for one in run.executions() if one.manager["task_id"] == "no_nodes_timeout"]
    assert execution.status.is_active
    assert run.counts(execution) == {"PENDING": 2}


@story
def test_an_unreachable_database_is_one_line_without_the_password(deployment: Deployment) -> None:
    run = deployment.shared_run("refusals")
    error = only_error(run, "nobody_there")
    assert re.search(r"database postgresql\S*@127\.0\.0\.1:\d+/warehouse: .*refused", error)
    assert PASSWORD not in run.log("nobody_there")


@story
def test_missing_tables_are_one_line_with_the_command_that_makes_them(deployment: Deployment) -> None:
    error = only_error(deployment.shared_run("refusals"), "never_migrated")
    assert "tables are missing" in error
    assert "schema 'nothing_here': run `dbpartition db upgrade`" in error


@story
def test_a_missing_connection_is_one_line_that_says_where_to_add_it(deployment: Deployment) -> None:
    error = only_error(deployment.shared_run("refusals"), "no_connection")
    assert "'no_such_connection' is not defined" in error
    assert "AIRFLOW_CONN_NO_SUCH_CONNECTION" in error


@story
def test_a_bad_partitioner_is_one_clear_error_and_writes_nothing(deployment: Deployment) -> None:
    run = deployment.shared_run("bad_partitioners")

    assert run.ends() == "failed"
    assert run.errors("raises") == [
        "AirflowException: raises failed: LookupError: the source has gone away",
        "LookupError: the source has gone away",  # the author's own, with the author's own frames
    ]
    expected = {
        "duplicates": "duplicates: partition key 'same' comes more than once",
        "not_a_number": "not_a_number: partition 'partition0' cannot be stored: context['amount']: nan is not a JSON",
        "zero_character": "zero_character: partition 'partition0' cannot be stored: context['text']: contains a NUL",
        "far_too_large": "far_too_large: the context of partition 'partition0' has 5242891 bytes, the limit is 1048576",
    }
    for task_id, words in expected.items():
        assert words in only_error(run, task_id)
        assert len(run.log(task_id)) < 200_000  # the five megabytes are not in it
    assert run.executions() == []


# --- what Airflow shows ----------------------------------------------------------------------------------------------


@story
def test_the_summary_is_small_and_nothing_else_goes_through_xcom(deployment: Deployment) -> None:
    run = deployment.run("plan_then_sensor", "many_partitions", {f"p{number:03}": {} for number in range(200)})

    assert run.ends() == "success"
    assert len(str(run.xcom("wait"))) < 1000
    assert isinstance(run.xcom("plan"), int)
    with pytest.raises(AirflowApiError, match="404"):
        run.xcom("plan", key="partitions")


@story
def test_a_task_has_its_link_while_it_waits_and_the_page_asks_who_is_there(deployment: Deployment) -> None:
    run = deployment.run("both_waits", "linked", gated(1))
    run.wait_for("blocking", "running")
    run.wait_for_log("blocking", "1 running")
    link = run.links("blocking")["Partitions"]
    (mine,) = [one for one in run.executions() if one.manager["task_id"] == "blocking"]
    assert link == f"/dbpartition/dbpartition_default/executions/{mine.job_execution_id}"

    with api_server_that_asks(deployment) as base_url:
        page = f"{base_url}{link}"
        assert httpx.get(page, trust_env=False).status_code == 401
        shown = httpx.get(page, trust_env=False, headers={"Authorization": f"Bearer {deployment.api.token()}"})
        assert (shown.status_code, "both_waits.blocking" in shown.text) == (200, True)

    run.open()
    assert run.ends() == "success"
    assert run.links("blocking")["Partitions"] == link


@story
def test_airflow_lists_the_provider(deployment: Deployment) -> None:
    (ours,) = [row for row in airflow_lists(deployment, "providers", "list") if "dbpartition" in str(row)]
    assert ours["package_name"] == "airflow-dbpartition"


@story
def test_airflow_lists_the_plugin_with_its_listener_and_its_pages(deployment: Deployment) -> None:
    (ours,) = [row for row in airflow_lists(deployment, "plugins") if row["name"] == "dbpartition"]
    assert "airflow_dbpartition.listener" in str(ours["listeners"])
    assert "dbpartition" in str(ours["fastapi_apps"])


@story
def test_airflow_has_no_import_errors(deployment: Deployment) -> None:
    assert airflow_lists(deployment, "dags", "list-import-errors") == []


def test_nothing_was_ever_done_twice_and_nothing_succeeded_over_a_failure(deployment: Deployment) -> None:
    """The last of all."""
    assert_nothing_was_done_twice(deployment)


@contextlib.contextmanager
def api_server_that_asks(deployment: Deployment) -> Iterator[str]:
    """A second API server; to the deployment's own, everybody is an administrator."""
    port = free_port()
    server = SessionProcess(
        [sys.executable, "-m", "airflow", "api-server"],
        log_path=deployment.airflow.log_path("second-api-server"),
        environment={
            **deployment.airflow.environment(),
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        },
        cwd=deployment.airflow.home,
    )
    base_url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.exit_code is None, log_tail(server.log_path)
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{base_url}/api/v2/version", trust_env=False, timeout=PATIENCE_S).status_code == 200
        return False

    try:
        wait_until(answers, "the second API server answers")
        yield base_url
    finally:
        server.kill()


def airflow_lists(deployment: Deployment, *words: str) -> list[dict[str, Any]]:
    """What an `airflow` command lists; its warnings come before, on the same stream."""
    ran = subprocess.run(
        [sys.executable, "-m", "airflow", *words, "--output", "json"],
        env=deployment.airflow.environment(),
        cwd=deployment.airflow.home,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = ran.stdout.strip().splitlines()[-1]
    return list(json.loads(rows)) if rows.startswith("[") else []
