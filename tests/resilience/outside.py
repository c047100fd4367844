"""The ledger outside the database, as steps write it."""

from __future__ import annotations

import os

from airflow_dbpartition.worker import PartitionContext


def write_outside(ctx: PartitionContext, what: str) -> None:
    """Append one line, whole and durable, whatever becomes of the process."""
    line = f"{what} {ctx.idempotency_key} {ctx.attempt} {ctx.node_id} {os.getpid()}\n".encode()
    descriptor = os.open(ctx.context["outside"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
