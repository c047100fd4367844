"""A step that takes as long as its range has rows. It sleeps, so that many nodes fit on few cores."""

from __future__ import annotations

import os
import time

from sqlalchemy import text

from airflow_dbpartition.worker import PartitionContext, step

ROW_SECONDS_VARIABLE = "BENCHMARK_ROW_SECONDS"  # a slow node has a larger one
TABLE = "items"

_COUNT = text(f"SELECT count(*) FROM {TABLE} WHERE id BETWEEN :low AND :high")


@step("sleep_rows")
def sleep_rows(ctx: PartitionContext) -> None:
    """Read how many rows the range has, and take so much time for each."""
    limits = {"low": ctx.context["min_value"], "high": ctx.context["max_value"]}
    with ctx.engine.connect() as connection:
        found = connection.execute(_COUNT, limits).scalar_one()
    time.sleep(found * float(os.environ[ROW_SECONDS_VARIABLE]))
