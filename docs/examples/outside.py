"""Steps whose effects lie outside the job repository's database: a key that does not change, and a way to stop."""

from __future__ import annotations

import os
import time
from pathlib import Path

from airflow_dbpartition.worker import PartitionContext, step

OUTBOX = Path(os.environ.get("OUTBOX", "outbox"))


# [start key]
@step("send_invoice")
def send_invoice(ctx: PartitionContext) -> dict[str, str]:
    # The same over attempts and restarts: the receiver can tell a repetition from a second invoice.
    name = OUTBOX / f"{ctx.idempotency_key}.txt"
    draft = name.with_name(f"{name.name}.{ctx.node_id}.draft")
    draft.write_text(f"invoice for {ctx.context['customer']}\n", encoding="utf-8")
    draft.replace(name)  # whole or not at all, and a second time it is the same file
    return {"file": name.name}


# [end key]


# [start stop]
@step("count_slowly")
def count_slowly(ctx: PartitionContext) -> int:
    done = int(ctx.checkpoint.get("done", 0))  # 0 at first; where it was left, after a restart
    while done < int(ctx.context["until"]):
        ctx.raise_if_stopping()  # a stop, a drain or a lost claim ends it here
        time.sleep(float(ctx.context.get("pause", 0.01)))
        done += 1
        if done % 10 == 0:
            ctx.checkpoint({"done": done})
    return done


# [end stop]
