"""The business date is the job's identity: a second run for the same date finds the first one's job."""

from __future__ import annotations

# [start dag]
from airflow.sdk import DAG, Param

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner

with DAG(
    "close_the_day",
    schedule=None,
    catchup=False,
    params={"business_date": Param("2026-11-30", type="string", format="date")},
):
    PartitionedStepOperator(
        task_id="check",
        step="check_orders",
        partitioner=ColumnRangePartitioner(table="orders", column="id"),
        job_name="close_the_day",
        job_parameters={"business_date": "{{ params.business_date }}"},
        if_complete="fail",  # or "return" what was done, or "rerun" it
        aggregator="daily_dag:findings",
        wait_for_completion=True,
        deferrable=True,
    )


def findings(results):
    """Called once, with (partition key, result) of every partition, read page by page."""
    return sum(result["findings"] for _key, result in results)


# [end dag]
