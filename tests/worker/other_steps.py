"""A module of steps without the one that the jobs of these tests ask for."""

from __future__ import annotations

from airflow_dbpartition.worker import PartitionContext, step


@step("something else")
def something_else(ctx: PartitionContext) -> str:
    return "else"
