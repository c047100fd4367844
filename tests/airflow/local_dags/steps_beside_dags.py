"""Steps in a file beside the DAGs. Airflow takes it for one of DAGs, and imports it again under a name of its own."""

from __future__ import annotations

from airflow_dbpartition.worker import PartitionContext, step

_refused: set[str] = set()


@step("greet")
def greet(ctx: PartitionContext) -> str:
    return f"Hello, {ctx.context['person']}!"


@step("refuse_grace")
def refuse_grace(ctx: PartitionContext) -> str:
    if ctx.context["person"] == "Grace":
        raise ValueError("there is no greeting for Grace")
    return greet(ctx)


@step("refuse_once")
def refuse_once(ctx: PartitionContext) -> str:
    """Edsger completes at the first try of the DAG's task, the others at the second."""
    person = ctx.context["person"]
    if person != "Edsger" and ctx.idempotency_key not in _refused:
        _refused.add(ctx.idempotency_key)
        raise ValueError(f"{person} has to come again")
    return f"{person}, attempt {ctx.attempt}"
