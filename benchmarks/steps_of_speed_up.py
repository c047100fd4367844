"""A step that computes: how sure is the mean delay of a range of flights? In plain Python, and nothing but."""

from __future__ import annotations

import random
import time
from typing import Any

from sqlalchemy import Connection, select

from airflow_dbpartition.demo.flights import flights
from airflow_dbpartition.worker import PartitionContext, step

RESAMPLES = 1000


def delay_interval(connection: Connection, low: int, high: int) -> dict[str, float]:
    """Return the 95 % confidence interval of the mean arrival delay of these flights, by the bootstrap."""
    found = connection.execute(select(flights.c.arr_delay).where(flights.c.id.between(low, high))).scalars()
    delays = [delay for delay in found if delay is not None]
    chance = random.Random(low)  # the same for whoever computes it again
    means = sorted(sum(chance.choices(delays, k=len(delays))) / len(delays) for _ in range(RESAMPLES))
    return {"least": means[RESAMPLES // 40], "most": means[-RESAMPLES // 40]}


@step("delay_interval")
def delay_interval_step(ctx: PartitionContext) -> dict[str, Any]:
    """One range, and the seconds that it took: by the clock, and of a processor."""
    begun, used = time.perf_counter(), time.thread_time()
    with ctx.engine.connect() as connection:
        interval = delay_interval(connection, ctx.context["min_value"], ctx.context["max_value"])
    return {**interval, "seconds": time.perf_counter() - begun, "processor_s": time.thread_time() - used}
