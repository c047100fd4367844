"""Partitioners: objects that cut a step into partitions. Importing this imports neither SQLAlchemy nor Airflow."""

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.partitioners.base import Partitioner, PartitionResult
from airflow_dbpartition.partitioners.collecting import PartitionSource, collect_partitions
from airflow_dbpartition.partitioners.column_range import ColumnRangePartitioner
from airflow_dbpartition.partitioners.environment import PartitionerEnvironment, StandaloneEnvironment
from airflow_dbpartition.partitioners.files import FilesPartitioner
from airflow_dbpartition.partitioners.function import FunctionPartitioner
from airflow_dbpartition.partitioners.query import QueryPartitioner
from airflow_dbpartition.partitioners.s3_keys import S3KeysPartitioner
from airflow_dbpartition.partitioners.simple import SimplePartitioner
from airflow_dbpartition.partitioners.values import ListPartitioner

__all__ = [
    "ColumnRangePartitioner",
    "FilesPartitioner",
    "FunctionPartitioner",
    "ListPartitioner",
    "Partition",
    "PartitionResult",
    "PartitionSource",
    "Partitioner",
    "PartitionerEnvironment",
    "QueryPartitioner",
    "S3KeysPartitioner",
    "SimplePartitioner",
    "StandaloneEnvironment",
    "collect_partitions",
]
