"""Two partitioned steps, one after the other, and an aggregator: which carrier departs on time?

The first step reconciles the flights by ranges of their ids, the second one reads each carrier's delays. The aggregator
makes one ranking of the second one's results, which is the task's return value. Workers run both steps: `dbpartition
worker --import airflow_dbpartition.demo.steps`.
"""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner, QueryPartitioner

with DAG(
    dag_id="punctual_carriers",
    description="Reconcile the flights, then rank the carriers by their mean delay",
    schedule=None,
    catchup=False,
    tags=["dbpartition", "example"],
    doc_md=__doc__,
):
    reconcile = PartitionedStepOperator(
        task_id="reconcile",
        step="reconcile_flights",
        partitioner=ColumnRangePartitioner(conn_id="warehouse", table="flights", column="id"),
        partitions_per_node=4,
        transferable=True,
        wait_for_completion=True,
        deferrable=True,
    )
    rank = PartitionedStepOperator(
        task_id="rank",
        step="carrier_delay",
        partitioner=QueryPartitioner(
            conn_id="warehouse", sql="SELECT DISTINCT carrier FROM flights ORDER BY carrier", key="carrier"
        ),
        transferable=True,
        aggregator="airflow_dbpartition.demo.ranking:by_mean_delay",
        wait_for_completion=True,
        deferrable=True,
    )
    reconcile >> rank
