"""Runs the DAGs of `dags/` that need no real Airflow by `dag.test()`, and prints as JSON what came of them.

A program of its own: `dag.test()` wants an Airflow whose metadata database and DAG folder are these DAGs' own.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import date, timedelta
from typing import Any

import boto3
from airflow.dag_processing.dagbag import DagBag
from sqlalchemy import func, insert, select

from airflow_dbpartition.demo import flights, importing
from airflow_dbpartition.testing import local_worker

MARK = "what came of them: "
CARRIERS = {"UA": 4, "AA": 12, "HA": -3}  # and the minutes by which each of its flights departs late
FILES = {"orders/a.csv": 1203, "orders/b.csv": 1, "orders/empty.csv": 0, "orders/notes.txt": 7}


def punctual_carriers(dag: Any, directory: str) -> dict[str, Any]:
    with local_worker(directory, imports=["airflow_dbpartition.demo.steps"], concurrency=2) as jobs:
        os.environ["AIRFLOW_CONN_WAREHOUSE"] = os.environ["AIRFLOW_CONN_DBPARTITION_DEFAULT"]
        flights.metadata.create_all(jobs.engine)
        rows = [
            {
                "id": 3 * number + place + 1,
                "flight_date": date(2013, 1, 1) + timedelta(days=number % 28),
                "carrier": carrier,
                "tailnum": f"N{number}",
                "dep_delay": late,
                "distance": 100,
                "air_time": 60,
                "arr_delay": 0,
                "origin": "EWR",
                "dest": "SFO",
                "flight": number,
            }
            for number in range(100)
            for place, (carrier, late) in enumerate(CARRIERS.items())
        ]
        with jobs.engine.begin() as connection:
            connection.execute(insert(flights.flights), rows)
        run = dag.test()
        ranking = run.get_task_instance("rank").xcom_pull(task_ids="rank")
        with jobs.engine.connect() as connection:
            totals = connection.execute(select(func.sum(flights.flight_totals.c.flights))).scalar()
        return {"state": run.state, "ranking": ranking, "flights": int(totals or 0), "report": jobs.report()}


def housekeeping(dag: Any, directory: str) -> dict[str, Any]:
    with local_worker(directory, steps={"work": lambda _ctx: None}):
        run = dag.test()
        return {"state": run.state, "purged": run.get_task_instance("purge").xcom_pull(task_ids="purge"), "report": ""}


def import_s3_files(dag: Any, directory: str) -> dict[str, Any]:
    client = boto3.client("s3")
    client.create_bucket(Bucket="landing")
    for key, lines in FILES.items():
        text = "order,cents\n" + "".join(f"{number},{number * 10}\n" for number in range(lines))
        client.put_object(Bucket="landing", Key=key, Body=text.encode())
    with local_worker(directory, imports=["airflow_dbpartition.demo.importing"], concurrency=2) as jobs:
        importing.metadata.create_all(jobs.engine)
        run = dag.test(run_conf={"bucket": "landing", "prefix": "orders/"})
        table = importing.imported_rows.c
        query = select(table.key, func.count(), func.max(table.line)).group_by(table.key).order_by(table.key)
        with jobs.engine.connect() as connection:
            rows = [list(row) for row in connection.execute(query)]
            last = connection.execute(select(table.fields).where(table.line == 1203)).scalar()
        return {"state": run.state, "rows": rows, "last": last, "report": jobs.report()}


def main() -> None:
    bag = DagBag()
    came: dict[str, Any] = {"import_errors": bag.import_errors}
    for run in (punctual_carriers, housekeeping, import_s3_files):
        directory = os.path.join(os.getcwd(), run.__name__)
        os.mkdir(directory)
        came[run.__name__] = run(bag.dags[run.__name__], directory)
    print(MARK + json.dumps(came), file=sys.stdout)


if __name__ == "__main__":
    main()
