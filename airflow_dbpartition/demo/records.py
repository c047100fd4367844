"""The records of the nightly batch: their table, what makes one valid, and how they are marked.

`python -m airflow_dbpartition.demo.records 2026-11-02 1000` makes the table in the job repository's database, with so
many pending records of that date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Date,
    Engine,
    Index,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    create_engine,
    insert,
    select,
    update,
)

from airflow_dbpartition.config import DatabaseConfig
from airflow_dbpartition.dialects import UtcDateTime, db_now, normalise_url

PENDING, PUBLISHED, INVALID, REFUSED = "PENDING", "PUBLISHED", "INVALID", "REFUSED"
STATUSES = (PENDING, PUBLISHED, INVALID, REFUSED)
REASON_CHARS = 500

metadata = MetaData()

# [start table]
# In the database of the job repository: a mark commits together with the checkpoint, or not at all.
records = Table(
    "records",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("reference_date", Date, nullable=False),
    Column("account", String(50), nullable=False),
    Column("cents", BigInteger, nullable=False),
    Column("currency", String(10), nullable=False),
    Column("memo", Text),
    Column("status", String(10), nullable=False, server_default=PENDING),
    Column("reason", String(REASON_CHARS), comment="why it is INVALID, or what SNS said when it REFUSED it"),
    Column("settled_time", UtcDateTime, comment="when it ceased to be PENDING"),
    CheckConstraint(f"status IN {STATUSES}", name="records_status"),
    Index("records_to_publish", "reference_date", "status", "id"),
)
# [end table]


Reasons = Mapping[int, str | None]  # by record id


class RecordsChangedError(Exception):
    """Records were settled by somebody else while they were being published."""


def pending(reference_date: date, first_id: int, last_id: int) -> Select[Any]:
    """What there is to publish of that date between two ids, both inclusive."""
    c = records.c
    return select(records).where(
        c.reference_date == reference_date, c.status == PENDING, c.id.between(first_id, last_id)
    )


def invalid_reason(record: Any) -> str | None:
    """Why a record must not be published, or None. `record` has the columns of `records` as attributes."""
    if not record.account.strip():
        return "no account"
    if record.cents <= 0:
        return f"{record.cents} cents is no amount"
    if not re.fullmatch(r"[A-Z]{3}", record.currency):
        return f"{record.currency!r} is no currency"
    return None


def settle(connection: Connection, status: str, reasons: Reasons) -> None:
    """Mark pending records, by id and with the reason, in the caller's transaction.

    Raises:
        RecordsChangedError: one of them is not pending any more; the transaction has to be rolled back.
    """
    by_reason: dict[str | None, list[int]] = {}
    for record_id, reason in reasons.items():
        by_reason.setdefault(reason and reason[:REASON_CHARS], []).append(record_id)
    for reason, ids in by_reason.items():
        marked = connection.execute(
            update(records)
            .where(records.c.id.in_(ids), records.c.status == PENDING)
            .values(status=status, reason=reason, settled_time=db_now())
        ).rowcount
        if marked != len(ids):
            raise RecordsChangedError(
                f"{len(ids) - marked} of {len(ids)} records were settled by somebody else before they could be marked "
                f"{status}: look for another job that publishes the same records"
            )


def make_records(
    engine: Engine, reference_date: date, count: int, *, changes: Mapping[int, Mapping[str, Any]] | None = None
) -> None:
    """Make the table where it is missing, and add so many pending records.

    Args:
        changes: other values for some columns of some records, by the record's number from 0.
    """
    rows = [
        {
            "reference_date": reference_date,
            "account": f"account {number % 97}",
            "cents": 100 + number,
            "currency": "EUR",
            "memo": None,
            "status": PENDING,
            "reason": None,
            **(changes or {}).get(number, {}),
        }
        for number in range(count)
    ]
    with engine.begin() as connection:
        metadata.create_all(connection)
        if rows:
            connection.execute(insert(records), rows)


def main(arguments: Sequence[str]) -> None:
    engine = create_engine(normalise_url(DatabaseConfig.from_environment().url))
    make_records(engine, date.fromisoformat(arguments[0]), int(arguments[1]))
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1:])
