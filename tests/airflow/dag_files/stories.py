"""The DAGs of the stories. What the partitions are comes from each run's own `conf`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.sensors import PartitionCompletionSensor

PARTITIONS = "{{ dag_run.conf['partitions'] }}"
SOON = timedelta(seconds=1)


def dag(dag_id: str) -> DAG:
    return DAG(dag_id, schedule=None, catchup=False, render_template_as_native_obj=True)


def plan(task_id: str = "plan", **options: Any) -> PartitionedStepOperator:
    return PartitionedStepOperator(**{"task_id": task_id, "step": "act", "partitioner": PARTITIONS, **options})


def operator(task_id: str = "work", **options: Any) -> PartitionedStepOperator:
    return plan(task_id, **{"wait_for_completion": True, "poll_interval": 1, **options})


def sensor(task_id: str, planned: PartitionedStepOperator, **options: Any) -> PartitionCompletionSensor:
    waits = PartitionCompletionSensor(
        task_id=task_id, **{"job_execution_id": planned.output, "poke_interval": 1, "deferrable": True, **options}
    )
    planned >> waits
    return waits


with dag("three_modes"):
    planned = plan()
    sensor("poked", planned, deferrable=False, mode="poke")
    sensor("rescheduled", planned, deferrable=False, mode="reschedule")
    sensor("deferred", planned)

with dag("both_waits"):
    operator("blocking", deferrable=False)
    operator("deferring", deferrable=True)

with dag("plan_then_sensor"):
    sensor("wait", plan(), deferrable=False)

with dag("plan_then_retrying_sensor"):
    sensor("wait", plan(), deferrable=False, mode="reschedule", retries=1, retry_delay=SOON)


def raises(grid_size: int) -> Iterator[dict[str, Any]]:
    yield {"number": 1}
    raise LookupError("the source has gone away")


def duplicates() -> list[Partition]:
    return [Partition("same", {}), Partition("same", {})]


def not_a_number() -> list[dict[str, Any]]:
    return [{"amount": math.nan}]


def zero_character() -> list[dict[str, Any]]:
    return [{"text": "a\x00b"}]


def far_too_large() -> list[dict[str, Any]]:
    return [{"blob": "x" * (5 * 1024 * 1024)}]


with dag("bad_partitioners"):
    for function in (raises, duplicates, not_a_number, zero_character, far_too_large):
        plan(function.__name__, partitioner=function)

TWO: dict[str, dict[str, Any]] = {"one": {}, "two": {}}

with dag("refusals"):
    plan("unknown_step", partitioner=TWO, step="never_registered")
    plan("no_nodes_fail", partitioner=TWO, node_group="deserted", no_nodes="fail")
    operator("no_nodes_timeout", partitioner=TWO, node_group="deserted", no_nodes_timeout=2)
    plan("nobody_there", partitioner=TWO, repository_conn_id="nobody_there")
    plan("never_migrated", partitioner=TWO, repository_conn_id="never_migrated")
    plan("no_connection", partitioner=TWO, repository_conn_id="no_such_connection")

with dag("mapped"):

    @task
    def slices() -> list[dict[str, dict[str, int]]]:
        return [{"a": {"rows": 1}}, {"a": {"rows": 10}, "b": {"rows": 100}}]

    cut = PartitionedStepOperator.partial(task_id="plan", step="act").expand(partitioner=slices())
    PartitionCompletionSensor.partial(task_id="wait", poke_interval=1).expand(job_execution_id=cut.output)
