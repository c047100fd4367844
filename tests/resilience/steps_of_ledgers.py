"""The step that writes both ledgers: one outside the database, and one in it through `ctx.transaction()`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from sqlalchemy import text

from airflow_dbpartition.worker import PartitionContext, step


@step("ledger")
def ledger(ctx: PartitionContext) -> Any:
    """Write `units` entries, each in a transaction of its own, with a pause before each."""
    _write_outside(ctx, "entered")
    if ctx.attempt <= ctx.context.get("failures", 0):
        raise ValueError(f"attempt {ctx.attempt} is meant to fail")
    if ctx.context.get("kills"):
        os.kill(os.getppid() if ctx.context["kills"] == "node" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    for unit in range(ctx.checkpoint.get("units", 0), ctx.context["units"]):
        time.sleep(ctx.context["pause_s"])
        with ctx.transaction() as connection:
            connection.execute(
                text(f"INSERT INTO {ctx.context['table']} (entry_key, unit, node_id) VALUES (:key, :unit, :node)"),
                {"key": ctx.idempotency_key, "unit": unit, "node": ctx.node_id},
            )
            ctx.checkpoint["units"] = unit + 1
            ctx.counters.write += 1
    _write_outside(ctx, "done")
    return {"node": ctx.node_id, "key": ctx.idempotency_key}


def _write_outside(ctx: PartitionContext, what: str) -> None:
    line = f"{what} {ctx.idempotency_key} {ctx.attempt} {ctx.node_id} {os.getpid()}\n".encode()
    descriptor = os.open(ctx.context["outside"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
