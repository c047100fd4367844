"""Import the CSV files below a prefix of an S3 bucket: lists of objects, balanced by bytes over the live nodes.

Workers outside Airflow (`dbpartition worker --import airflow_dbpartition.demo.importing`, with boto3 and credentials of
their own) read the objects and write each line once into the table `imported_rows` of the job repository's database. A
file that was begun goes on behind its last committed line.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import S3KeysPartitioner

with DAG(
    dag_id="import_s3_files",
    description="Read CSV objects from S3 into a table, each line exactly once",
    schedule=None,
    catchup=False,
    params={
        "bucket": Param("landing", type="string", minLength=3),
        "prefix": Param("", type="string", description="what the keys begin with"),
    },
    tags=["dbpartition", "example"],
    doc_md=__doc__,
):
    PartitionedStepOperator(
        task_id="import",
        step="import_s3_files",
        partitioner=S3KeysPartitioner(
            "{{ params.bucket }}",
            "{{ params.prefix }}",
            suffix=".csv",
            bins="grid",
            min_size_bytes=1,
            conn_id="aws_default",
        ),
        partitions_per_node=4,
        transferable=True,  # each line is written exactly once
        partition_retries=3,
        wait_for_completion=True,
        deferrable=True,
    )
