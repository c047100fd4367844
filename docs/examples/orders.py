"""A step that checks orders and writes what it found, each page exactly once, into the job repository's database."""

from __future__ import annotations

# [start step]
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert, select

from airflow_dbpartition.worker import PartitionContext, step

metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("cents", BigInteger))
findings = Table("findings", metadata, Column("order_id", BigInteger), Column("finding", String(100)))


@step("check_orders")
def check_orders(ctx: PartitionContext) -> dict[str, int]:
    low, high = ctx.context["min_value"], ctx.context["max_value"]
    query = select(orders).where(orders.c.id.between(low, high))
    for page in ctx.read_keyset(query, key=orders.c.id, size=1000):
        with ctx.transaction() as connection:  # these rows, the checkpoint, the counters and the fence, or nothing
            for order in page:
                if order.cents < 0:
                    connection.execute(insert(findings).values(order_id=order.id, finding="negative amount"))
                    ctx.counters.write += 1
    return {"read": ctx.counters.read, "findings": ctx.counters.write}


# [end step]
