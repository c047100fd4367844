"""Check all orders every day, split over the worker nodes that are alive."""

from __future__ import annotations

# [start dag]
from datetime import datetime

from airflow.sdk import DAG

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.sensors import PartitionCompletionSensor

with DAG("check_orders", schedule="@daily", start_date=datetime(2026, 1, 1), catchup=False):
    plan = PartitionedStepOperator(
        task_id="plan",
        step="check_orders",
        partitioner=ColumnRangePartitioner(table="orders", column="id"),
        partitions_per_node=4,
        transferable=True,  # each page is written exactly once, so a partition may run again
    )
    done = PartitionCompletionSensor(task_id="done", job_execution_id=plan.output, deferrable=True)
    plan >> done
# [end dag]
