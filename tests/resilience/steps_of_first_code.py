"""The step `ledger` as it was first deployed: it breaks where it is told to, heeds a stop, and can be held half way.

`steps_of_ledgers.py` is the mended code: it has the same step, and takes no notice of what is said to this one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import text

from airflow_dbpartition.errors import ClaimLostError
from airflow_dbpartition.worker import PartitionContext, step
from tests.resilience.outside import write_outside

_PATIENCE_S = 120.0  # nothing waits for ever, not even in a test that has gone wrong


@step("ledger")
def ledger(ctx: PartitionContext) -> Any:
    """Write `units` entries, each in a transaction of its own.

    `broken_at` is the unit that cannot be done. `held` is where the step waits for the file `gate`: "between" two
    transactions, "inside" an open one (both at the second unit), or "after" the last one.
    """
    write_outside(ctx, "entered")
    held = ctx.context.get("held")
    for unit in range(ctx.checkpoint.get("units", 0), ctx.context["units"]):
        if held == "between" and unit == 1:
            _wait(ctx)
        ctx.raise_if_stopping()
        time.sleep(ctx.context["pause_s"])
        if unit == ctx.context.get("broken_at"):
            raise ValueError(f"unit {unit} is more than this code can do")
        try:
            with ctx.transaction() as connection:
                connection.execute(
                    text(f"INSERT INTO {ctx.context['table']} (entry_key, unit, node_id) VALUES (:key, :unit, :node)"),
                    {"key": ctx.idempotency_key, "unit": unit, "node": ctx.node_id},
                )
                if held == "inside" and unit == 1:
                    _wait(ctx)
                ctx.checkpoint["units"] = unit + 1
                ctx.counters.write += 1
        except ClaimLostError:
            write_outside(ctx, "refused")
            raise
    if held == "after":
        _wait(ctx)
    write_outside(ctx, "done")
    return {"node": ctx.node_id, "key": ctx.idempotency_key}


def _wait(ctx: PartitionContext) -> None:
    """Until the gate is there; a stop is heeded where nothing is open."""
    write_outside(ctx, "held")
    gate, deadline = Path(ctx.context["gate"]), time.monotonic() + _PATIENCE_S
    while not gate.exists() and time.monotonic() < deadline:
        if ctx.context["held"] == "between":
            ctx.raise_if_stopping()
        time.sleep(0.02)
