"""DAGs that are run by `dag.test()`: every way to launch and to wait.

Their intervals are so long that no test would end if the local worker's connection did not shorten them. The step
`greet_when_awaited` begins when somebody has looked for its end: so a wait never finds everything done.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_dbpartition.hooks import JobRepositoryHook
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner, ListPartitioner
from airflow_dbpartition.sensors import PartitionCompletionSensor

NAMES = ListPartitioner(["Ada", "Grace", "Edsger"], context_name="person")


def greet(**options: Any) -> PartitionedStepOperator:
    return PartitionedStepOperator(
        **{"task_id": "greet", "step": "greet_when_awaited", "partitioner": NAMES, **options}
    )


def greet_and_wait(*, deferrable: bool = False, **options: Any) -> PartitionedStepOperator:
    return greet(wait_for_completion=True, poll_interval=600, deferrable=deferrable, **options)


def then_wait(plan: PartitionedStepOperator, **options: Any) -> None:
    PartitionCompletionSensor(
        **{"task_id": "done", "job_execution_id": plan.output, "poke_interval": 600, "deferrable": False, **options}
    )


with DAG("blocking", schedule=None) as blocking:
    greet_and_wait()

with DAG("deferred", schedule=None) as deferred:
    greet_and_wait(deferrable=True)

with DAG("sensor_pokes", schedule=None) as sensor_pokes:
    then_wait(greet())

with DAG("sensor_deferred", schedule=None) as sensor_deferred:
    then_wait(greet(), deferrable=True)

with DAG("sensor_reschedules", schedule=None) as sensor_reschedules:
    then_wait(greet(), mode="reschedule", poke_interval=0.1)

with DAG("only_plans", schedule=None) as only_plans:
    greet(step="greet")

with DAG("fails", schedule=None) as fails:
    greet_and_wait(step="refuse_grace")

with DAG("fails_deferred", schedule=None) as fails_deferred:
    greet_and_wait(step="refuse_grace", deferrable=True)

with DAG("retried", schedule=None) as retried:
    greet_and_wait(step="refuse_once", retries=1, retry_delay=timedelta(seconds=0.1))

with DAG("mapped", schedule=None) as mapped:
    PartitionedStepOperator.partial(
        task_id="greet", step="greet", wait_for_completion=True, poll_interval=600, deferrable=False
    ).expand(partitioner=[{"a": {"person": "Ada"}}, {"g": {"person": "Grace"}, "e": {"person": "Edsger"}}])

with DAG("chunks_and_pages", schedule=None) as chunks_and_pages:
    halves: dict[str, Any] = {"partitions_per_node": 2, "wait_for_completion": True, "poll_interval": 600}
    booked = PartitionedStepOperator(
        task_id="book", step="book_lines", partitioner=ColumnRangePartitioner(table="lines", column="id"), **halves
    )
    checked = PartitionedStepOperator(
        task_id="check", step="check_orders", partitioner=ColumnRangePartitioner(table="orders", column="id"), **halves
    )

    @task
    def add_up(summary: Any) -> int:
        results = JobRepositoryHook().iter_results(summary["job_execution_id"])
        return sum(result["write"] for _key, result in results)

    add_up(booked.output)
