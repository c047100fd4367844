"""A chunk-oriented step: read items, process each, write them in chunks, skip the bad ones."""

from __future__ import annotations

# [start step]
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.engine import Connection

from airflow_dbpartition.worker import ChunkStep, KeysetReader, PartitionContext, step

metadata = MetaData()
lines = Table("lines", metadata, Column("id", Integer, primary_key=True), Column("amount", String(40)))
booked = Table("booked", metadata, Column("line_id", BigInteger), Column("cents", BigInteger))


class BadLineError(Exception):
    """This line is wrong; the others may be right."""


def lines_of(ctx: PartitionContext) -> Any:
    return select(lines).where(lines.c.id.between(ctx.context["min_value"], ctx.context["max_value"]))


def to_cents(line: Any) -> dict[str, int] | None:
    if line.amount == "":
        return None  # filtered: counted, and not written
    try:
        return {"line_id": line.id, "cents": round(float(line.amount) * 100)}
    except ValueError:
        raise BadLineError(f"line {line.id} has the amount {line.amount!r}") from None


def write(items: list[dict[str, int]], connection: Connection) -> None:
    connection.execute(insert(booked), items)


book_lines = step("book_lines")(
    ChunkStep(
        reader=KeysetReader(lines_of, key=lines.c.id),
        processor=to_cents,
        writer=write,
        chunk_size=500,
        skip=(BadLineError,),
        skip_limit=10,
    )
)
# [end step]
