"""A step that wants more connections than one."""

from __future__ import annotations

import contextlib
import threading

from airflow_dbpartition.worker import PartitionContext, step

SLOTS = 8
_ALL_ARE_HERE = threading.Barrier(SLOTS, timeout=60)


@step("greedy")
def greedy(ctx: PartitionContext) -> int:
    """Hold a transaction; once every slot holds one, take so many connections `more`."""
    with contextlib.ExitStack() as held:
        held.enter_context(ctx.transaction())
        if ctx.context["together"]:
            _ALL_ARE_HERE.wait()
        for _ in range(ctx.context["more"]):
            held.enter_context(ctx.engine.connect())
    return int(ctx.context["more"])
