"""How long a job execution took, from the tables: from the writing of its plan to the end of its last partition."""

from __future__ import annotations

import time
from contextlib import closing

import psycopg2
from servers import libpq_url, rows

PATIENCE_S = 600.0
LOOK_S = 0.1

_BEGAN = "SELECT extract(epoch FROM create_time)::float8 FROM batch_job_executions WHERE job_execution_id = %s"
_LAST_END = "SELECT extract(epoch FROM max(end_time))::float8 FROM batch_partitions WHERE job_execution_id = %s"
_STATUS = "SELECT status FROM batch_job_executions WHERE job_execution_id = %s"


def began_at(url: str, job_execution_id: int) -> float:
    """The moment, by the database's clock, at which the plan was written."""
    return float(rows(url, _BEGAN, (job_execution_id,))[0][0])


def makespan_s(url: str, job_execution_id: int) -> float:
    """Wait until all partitions are completed, and return how long it took until the last one was.

    Raises:
        SystemExit: it ended otherwise, or not at all.
    """
    _wait(url, job_execution_id)
    return float(rows(url, _LAST_END, (job_execution_id,))[0][0]) - began_at(url, job_execution_id)


def _wait(url: str, job_execution_id: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    # One connection for all looks: to begin one costs the server more than many of them.
    with closing(psycopg2.connect(libpq_url(url))) as connection:
        connection.autocommit = True
        while True:
            with connection.cursor() as cursor:
                cursor.execute(_STATUS, (job_execution_id,))
                ((status,),) = cursor.fetchall()
            if status == "COMPLETED":
                return
            if status not in ("STARTING", "STARTED") or time.monotonic() > deadline:
                raise SystemExit(f"job execution {job_execution_id} is {status}")
            time.sleep(LOOK_S)
