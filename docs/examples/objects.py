"""A step that reads the objects of its partition from S3: one, a list, or a range of them."""

from __future__ import annotations

# [start step]
import boto3
from sqlalchemy import BigInteger, Column, MetaData, String, Table, insert

from airflow_dbpartition.worker import PartitionContext, s3_keys, step

metadata = MetaData()
object_lines = Table("object_lines", metadata, Column("key", String(1024)), Column("lines", BigInteger))


@step("count_lines")
def count_lines(ctx: PartitionContext) -> dict[str, int]:
    client = boto3.client("s3")
    for key in s3_keys(ctx.context, client, after=ctx.checkpoint.get("done")):  # a page of keys in memory, not all
        ctx.raise_if_stopping()
        body = client.get_object(Bucket=ctx.context["bucket"], Key=key)["Body"]
        lines = sum(1 for _ in body.iter_lines())
        with ctx.transaction() as connection:
            connection.execute(insert(object_lines).values(key=key, lines=lines))
            ctx.checkpoint["done"] = key
            ctx.counters.write += 1
    return {"objects": ctx.counters.write}


# [end step]
