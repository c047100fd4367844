"""The step of the nightly batch, as a user would write it: publish pending records to SNS, and mark them.

A worker runs it: `dbpartition worker --import airflow_dbpartition.demo.publishing`. It needs boto3
(`pip install 'airflow-dbpartition[amazon-worker]'`), which finds credentials and endpoint in the worker's environment.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Any

from airflow_dbpartition.demo.records import (
    INVALID,
    PUBLISHED,
    REFUSED,
    Reasons,
    invalid_reason,
    pending,
    records,
    settle,
)
from airflow_dbpartition.demo.sns import MOST_BYTES, CheckedPublisher, Message
from airflow_dbpartition.worker import PartitionContext, step

CHUNK_RECORDS = 100
REFUSAL_LIMIT = 10  # in one partition; with more of them it is not the messages that are wrong


# [start step]
@step("publish_pending_records")
def publish_pending_records(ctx: PartitionContext) -> dict[str, int]:
    """One partition: the pending records of `reference_date` from `min_value` to `max_value`, chunk by chunk."""
    publisher = CheckedPublisher(ctx.context["topic_arn"], before_call=ctx.raise_if_stopping)
    refusal_limit = ctx.context.get("refusal_limit", REFUSAL_LIMIT)
    done: dict[str, int] = ctx.checkpoint.get("done", {PUBLISHED: 0, INVALID: 0, REFUSED: 0})
    query = pending(
        date.fromisoformat(ctx.context["reference_date"]), ctx.context["min_value"], ctx.context["max_value"]
    )
    for chunk in ctx.read_keyset(query, key=records.c.id, size=ctx.context.get("chunk_size", CHUNK_RECORDS)):
        valid, invalid = sorted_out(chunk)
        # Not in the transaction: SNS takes its time. If we die before the commit, this chunk is published once more.
        said = publisher.publish(valid.values(), most_refusals=refusal_limit - done[REFUSED])
        refused = {record_id: said[message.id] for record_id, message in valid.items() if message.id in said}
        published = dict.fromkeys(valid.keys() - refused.keys())
        marks: dict[str, Reasons] = {PUBLISHED: published, INVALID: invalid, REFUSED: refused}
        done = {status: done[status] + len(reasons) for status, reasons in marks.items()}
        with ctx.transaction() as connection:  # the marks, the checkpoint, the counters and the fence, or nothing
            for status, reasons in marks.items():
                settle(connection, status, reasons)
            ctx.checkpoint["done"] = done
            ctx.counters.write += len(published)
            ctx.counters.skip += len(invalid) + len(refused)
    return done


# [end step]


def sorted_out(chunk: Any) -> tuple[dict[int, Message], dict[int, str]]:
    """The messages of the valid records, and why the others are not, by record id."""
    valid: dict[int, Message] = {}
    invalid: dict[int, str] = {}
    for record in chunk:
        message = message_of(record)
        reason = invalid_reason(record)
        if reason is None and message.size_bytes > MOST_BYTES:
            reason = f"its message has {message.size_bytes} bytes, and SNS takes {MOST_BYTES}"
        if reason is None:
            valid[record.id] = message
        else:
            invalid[record.id] = reason
    return valid, invalid


# [start message]
def message_of(record: Any) -> Message:
    """What is published of a record. The id never changes: whoever reads the message knows a repetition by it."""
    day = record.reference_date.isoformat()
    message_id = f"record-{day}-{record.id}"
    body = {
        "message_id": message_id,
        "record_id": record.id,
        "reference_date": day,
        "account": record.account,
        "cents": record.cents,
        "currency": record.currency,
        "memo": record.memo,
    }
    return Message(message_id, json.dumps(body))  # in ASCII: SNS refuses some other characters


# [end message]
