"""Reconcile a year of flights, split over the worker nodes that are alive: the DAG of `make demo`.

Each partition is a range of flight ids. Workers outside Airflow (`dbpartition worker --import
airflow_dbpartition.demo.steps`) validate its flights and add them up per carrier and day, each page exactly once.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import ColumnRangePartitioner
from airflow_dbpartition.sensors import PartitionCompletionSensor

with DAG(
    dag_id="reconcile_flights",
    description="Validate 336,776 flights and sum them up, on workers outside Airflow",
    schedule=None,
    catchup=False,
    tags=["dbpartition", "demo"],
    doc_md=__doc__,
):
    plan = PartitionedStepOperator(
        task_id="reconcile",
        step="reconcile_flights",
        partitioner=ColumnRangePartitioner(conn_id="warehouse", table="flights", column="id"),
        partitions_per_node=8,
        transferable=True,  # each page is written exactly once, so a partition may run again when its node is lost
        retries=2,
        retry_delay=timedelta(seconds=10),
    )
    done = PartitionCompletionSensor(
        task_id="reconciled",
        job_execution_id=plan.output,
        deferrable=True,
        poke_interval=1,
        timeout=timedelta(hours=1),
    )
    plan >> done
