"""The demo's step, as a user would write it: validate a range of flights and add up carrier and day totals."""

from __future__ import annotations

import os
import time
from typing import Any

from sqlalchemy import func, select

from airflow_dbpartition.demo.flights import flights, write_page
from airflow_dbpartition.worker import PartitionContext, step

PAGE_ROWS = 1000
# The demo slows each page down a little, so that there is something to watch and a worker to kill in the middle.
PAGE_PAUSE_S = float(os.environ.get("DBPARTITION_DEMO_PAGE_PAUSE", "0"))


@step("reconcile_flights")
def reconcile_flights(ctx: PartitionContext) -> dict[str, Any]:
    """One partition: the flights from min_value to max_value, page by page, each page exactly once."""
    low, high = ctx.context["min_value"], ctx.context["max_value"]
    query = select(flights).where(flights.c.id.between(low, high))
    for page in ctx.read_keyset(query, key=flights.c.id, size=PAGE_ROWS):
        with ctx.transaction() as connection:  # the page's totals + checkpoint + counters + fence, or nothing
            written = write_page(connection, page, job_instance_id=ctx.job_instance_id)
            ctx.counters.write += written.valid
            ctx.counters.skip += written.rejected
        time.sleep(PAGE_PAUSE_S)
    return {"first": low, "last": high, "written": ctx.counters.write}


@step("carrier_delay")
def carrier_delay(ctx: PartitionContext) -> dict[str, Any]:
    """One partition: how late the flights of one carrier departed; a result, and nothing written."""
    query = select(func.count(flights.c.dep_delay), func.sum(flights.c.dep_delay)).where(
        flights.c.carrier == ctx.context["carrier"]
    )
    with ctx.engine.connect() as connection:
        departed, minutes = connection.execute(query).one()
    ctx.counters.read += departed
    return {"departed": departed, "delay_minutes": int(minutes or 0)}
