"""The smallest step: it greets one person."""

from __future__ import annotations

# [start step]
from airflow_dbpartition.worker import PartitionContext, step


@step("greet")
def greet(ctx: PartitionContext) -> dict[str, str]:
    ctx.log.info("greeting", person=ctx.context["person"])
    return {"greeting": f"Hello, {ctx.context['person']}!"}


# [end step]
