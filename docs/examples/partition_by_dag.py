"""Every way to cut a step into partitions."""

from __future__ import annotations

from airflow.sdk import DAG, task

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import (
    ColumnRangePartitioner,
    FilesPartitioner,
    ListPartitioner,
    Partition,
    QueryPartitioner,
    S3KeysPartitioner,
)


# [start quarters]
def quarters() -> list[Partition]:
    return [Partition(key=f"2026-Q{quarter}", context={"quarter": quarter}) for quarter in range(1, 5)]


# [end quarters]


# [start tenants]
@task
def find_tenants() -> list[dict[str, str]]:
    return [{"tenant": "acme"}, {"tenant": "globex"}]


# [end tenants]


with DAG("partition_by", schedule=None, catchup=False):
    # [start ranges]
    PartitionedStepOperator(
        task_id="by_range",
        step="check_orders",
        partitioner=ColumnRangePartitioner(
            conn_id="warehouse",  # left out: the job repository's own database
            table="orders",
            column="id",  # integers, dates or timestamps
            where="created >= DATE '2026-01-01'",
            balanced=True,  # about the same number of rows in each, whatever the gaps
        ),
        partitions_per_node=4,
    )
    # [end ranges]

    # [start files]
    PartitionedStepOperator(
        task_id="by_file",
        step="load_file",
        partitioner=FilesPartitioner("s3://landing/{{ dag_run.run_id }}", pattern="*.csv", conn_id="aws_default"),
    )
    PartitionedStepOperator(
        task_id="by_bins_of_files",
        step="load_files",
        partitioner=FilesPartitioner("/data/landing", recursive=True, bins="grid"),
        partitions_per_node=2,
    )
    # [end files]

    # [start s3]
    PartitionedStepOperator(
        task_id="by_object",
        step="count_lines",
        partitioner=S3KeysPartitioner("landing", "orders/{{ params.region }}/", suffix=".csv", conn_id="aws_default"),
        params={"region": "eu"},
    )
    PartitionedStepOperator(
        task_id="by_ranges_of_keys",
        step="count_lines",
        partitioner=S3KeysPartitioner("landing", "events/", ranges="grid", min_size_bytes=1, conn_id="aws_default"),
        partitions_per_node=8,
    )
    # [end s3]

    # [start query]
    PartitionedStepOperator(
        task_id="by_row",
        step="bill_tenant",
        partitioner=QueryPartitioner(
            "SELECT tenant_id, orders FROM tenants WHERE region = :region",
            parameters={"region": "{{ params.region }}"},
            key="tenant_id",
            weight="orders",  # heaviest first
            conn_id="warehouse",
        ),
        params={"region": "eu"},
    )
    # [end query]

    # [start list]
    PartitionedStepOperator(
        task_id="by_tenant",
        step="bill_tenant",
        partitioner=ListPartitioner(["acme", "globex", "initech"], context_name="tenant"),
    )
    # [end list]

    # [start function]
    PartitionedStepOperator(task_id="by_function", step="close_quarter", partitioner=quarters)
    # [end function]

    # [start xcom]
    PartitionedStepOperator(task_id="by_earlier_task", step="bill_tenant", partitioner=find_tenants())
    # [end xcom]
