"""The step of the DAG `import_s3_files`: CSV objects of S3 become rows of a table, each line exactly once."""

from __future__ import annotations

import csv
from contextlib import closing
from itertools import islice

from sqlalchemy import JSON, Column, Integer, MetaData, String, Table, insert

from airflow_dbpartition.worker import PartitionContext, s3_keys, step

ROWS_PER_TRANSACTION = 500

metadata = MetaData()
imported_rows = Table(
    "imported_rows",
    metadata,
    Column("bucket", String(63), primary_key=True),
    Column("key", String(512), primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False, comment="from 1, the heading not counted"),
    Column("fields", JSON, nullable=False, comment="by the names in the heading"),
)


@step("import_s3_files")
def import_s3_files(ctx: PartitionContext) -> dict[str, int]:
    """The objects of one partition, one after the other; an interrupted one goes on behind its last committed line."""
    import boto3

    client, bucket = boto3.client("s3"), ctx.context["bucket"]
    for key in s3_keys(ctx.context, client, after=ctx.checkpoint.get("done")):
        done = ctx.checkpoint.get("line", 0) if ctx.checkpoint.get("key") == key else 0
        with closing(client.get_object(Bucket=bucket, Key=key)["Body"]) as body:
            lines = enumerate(csv.DictReader(text.decode() for text in body.iter_lines()), start=1)
            rest = islice(lines, done, None)
            while chunk := list(islice(rest, ROWS_PER_TRANSACTION)):
                ctx.raise_if_stopping()
                with ctx.transaction() as connection:
                    rows = [{"bucket": bucket, "key": key, "line": line, "fields": fields} for line, fields in chunk]
                    connection.execute(insert(imported_rows), rows)
                    ctx.checkpoint.update(key=key, line=chunk[-1][0])
                    ctx.counters.write += len(rows)
        ctx.checkpoint["done"] = key
        ctx.checkpoint.save()
    return {"rows": ctx.counters.write}
