"""The workers' step in the stories: it does what its context says, and writes down that it has."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from airflow_dbpartition.worker import PartitionContext, step

GATES_VARIABLE = "STORY_GATES"

metadata = MetaData()
begun = Table(
    "story_begun",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("job_instance_id", Integer, nullable=False),
    Column("job_execution_id", Integer, nullable=False),
    Column("partition_key", String(200), nullable=False),
)
# No uniqueness here: a second row is what the tests look for.
done = Table(
    "story_done",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("job_instance_id", Integer, nullable=False),
    Column("job_execution_id", Integer, nullable=False),
    Column("partition_key", String(200), nullable=False),
)


@step("act")
def act(ctx: PartitionContext) -> dict[str, Any]:
    """Wait for the file `gate`, fail the first `fails` times `because`, and write `rows`."""
    who = {
        "job_instance_id": ctx.job_instance_id,
        "job_execution_id": ctx.job_execution_id,
        "partition_key": ctx.partition_key,
    }
    with ctx.engine.begin() as connection:
        earlier = connection.execute(
            select(func.count())
            .select_from(begun)
            .where(
                begun.c.job_instance_id == ctx.job_instance_id,
                begun.c.partition_key == ctx.partition_key,
            )
        ).scalar_one()
        connection.execute(insert(begun).values(who))
    gate = ctx.context.get("gate")
    while gate is not None and not (Path(os.environ[GATES_VARIABLE]) / gate).exists():
        ctx.raise_if_stopping()
        time.sleep(0.05)
    if earlier < ctx.context.get("fails", 0):
        raise ValueError(ctx.context.get("because", "as it was told"))
    with ctx.transaction() as connection:
        connection.execute(insert(done).values(who))
        ctx.counters.write += ctx.context.get("rows", 1)
    return {"rows": ctx.counters.write}
