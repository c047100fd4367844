"""The step that writes both ledgers: one outside the database, and one in it through `ctx.transaction()`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from sqlalchemy import text

from airflow_dbpartition.worker import ClaimLostError, PartitionContext, step
from tests.resilience.outside import write_outside

_PATIENCE_S = 120.0  # nothing waits for ever, not even in a test that has gone wrong


@step("ledger")
def ledger(ctx: PartitionContext) -> Any:
    """Write `units` entries, each in a transaction of its own, with a pause before each; before the last one `do`."""
    write_outside(ctx, "entered")
    if ctx.attempt <= ctx.context.get("failures", 0):
        raise ValueError(f"attempt {ctx.attempt} is meant to fail")
    if ctx.context.get("kills"):
        os.kill(os.getppid() if ctx.context["kills"] == "node" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    result: Any = {"node": ctx.node_id, "key": ctx.idempotency_key}
    for unit in range(ctx.checkpoint.get("units", 0), ctx.context["units"]):
        time.sleep(ctx.context["pause_s"])
        if "do" in ctx.context and unit == ctx.context["units"] - 1:
            from tests.worker.steps_of_workers import work  # registers a step: only where it is wanted

            result = work(ctx)
        _hold(ctx, "before", unit)
        try:
            with ctx.transaction() as connection:
                connection.execute(
                    text(f"INSERT INTO {ctx.context['table']} (entry_key, unit, node_id) VALUES (:key, :unit, :node)"),
                    {"key": ctx.idempotency_key, "unit": unit, "node": ctx.node_id},
                )
                ctx.checkpoint["units"] = unit + 1
                ctx.counters.write += 1
                _hold(ctx, "inside", unit)
        except ClaimLostError:
            write_outside(ctx, "refused")
            raise
        _hold(ctx, "after", unit)
    write_outside(ctx, "done")
    return result


def _hold(ctx: PartitionContext, where: str, unit: int) -> None:
    """Wait for the gate of this node: before, inside or after the transaction of a unit, as the test asks."""
    hold = ctx.context.get("hold", {})
    if (hold.get("where"), hold.get("unit")) != (where, unit):
        return
    write_outside(ctx, "held")
    gate = Path(f"{hold['gate']} of {ctx.node_id.rsplit('-', 1)[0]}")
    deadline = time.monotonic() + _PATIENCE_S
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
