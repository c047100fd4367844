"""What a step's author imports, and the worker that runs steps outside Airflow."""

from airflow_dbpartition.errors import ClaimLostError, StepInterruptedError
from airflow_dbpartition.worker.chunks import ChunkStep, KeysetReader
from airflow_dbpartition.worker.context import PartitionContext
from airflow_dbpartition.worker.objects import s3_keys
from airflow_dbpartition.worker.steps import step

__all__ = ["ChunkStep", "ClaimLostError", "KeysetReader", "PartitionContext", "StepInterruptedError", "s3_keys", "step"]
