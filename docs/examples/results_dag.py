"""One task that launches and waits, and one that reads the partitions' results."""

from __future__ import annotations

# [start dag]
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_dbpartition.hooks import JobRepositoryHook
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner

with DAG("check_orders_and_sum", schedule=None, catchup=False):
    check = PartitionedStepOperator(
        task_id="check",
        step="check_orders",
        partitioner=ColumnRangePartitioner(table="orders", column="id"),
        transferable=True,
        wait_for_completion=True,
        deferrable=True,
        timeout=timedelta(hours=2),
        partition_timeout=timedelta(minutes=20),
        partition_retries=2,
    )

    @task
    def sum_up(summary: Any) -> int:
        results = JobRepositoryHook().iter_results(summary["job_execution_id"])  # page by page, never through XCom
        return sum(result["findings"] for _key, result in results)

    sum_up(check.output)
# [end dag]
