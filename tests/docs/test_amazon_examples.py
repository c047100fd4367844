"""The examples that talk to AWS do what the pages say, against moto's server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.engine import Engine

pytest.importorskip("moto")

from airflow_dbpartition.demo.processes import Guard
from airflow_dbpartition.demo.records import make_records, records
from airflow_dbpartition.partitioners import S3KeysPartitioner, StandaloneEnvironment, collect_partitions
from tests.docs.test_examples import EXAMPLES, Bench, load
from tests.worker.sns import CREDENTIALS, REGION, MotoServer, client, moto_server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    guard = Guard()
    with moto_server(tmp_path_factory.mktemp("moto"), guard) as server:
        yield server
    guard.close()


class ListedByBoto3(StandaloneEnvironment):
    """As inside Airflow, with boto3's client in the hook's place."""

    def __init__(self, s3: Any) -> None:
        super().__init__()
        self._s3 = s3

    def s3_objects(self, bucket: str, prefix: str, conn_id: str | None) -> Iterator[tuple[str, int]]:
        for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for listed in page.get("Contents", ()):
                yield listed["Key"], listed["Size"]


@pytest.mark.parametrize("options", [{}, {"bins": 2}, {"ranges": 3}], ids=str)
def test_the_lines_of_every_object_are_counted_once(tmp_path: Path, moto: MotoServer, options: dict[str, Any]) -> None:
    bench = Bench(tmp_path)
    bench.environment.update(CREDENTIALS, AWS_ENDPOINT_URL=moto.url, AWS_DEFAULT_REGION=REGION)
    example = load(EXAMPLES / "objects.py")
    bench.create_tables()
    example.metadata.create_all(bench.engine)
    s3 = client("s3", moto.url)
    bucket = f"landing-{'-'.join(options)}1"
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    lines = {f"orders/eu/{number}.csv": number for number in range(7)}
    for key, count in lines.items():
        s3.put_object(Bucket=bucket, Key=key, Body=b"line\n" * count)

    partitioner = S3KeysPartitioner(bucket, "orders/eu/", suffix=".csv", **options)
    found = collect_partitions(partitioner, grid_size=4, environment=ListedByBoto3(s3))
    job = bench.submit("count_lines", {partition.key: partition.context for partition in found})
    bench.work("objects")

    assert {row["status"] for row in bench.partitions(job).values()} == {"COMPLETED"}
    with bench.engine.connect() as connection:
        counted = connection.execute(select(example.object_lines)).all()
    assert Counter(counted) == Counter(lines.items())
    bench.engine.dispose()


def test_the_queries_about_records_run_on_every_database(engine: Engine) -> None:
    day = date(2026, 11, 2)
    refused = {"status": "REFUSED", "reason": "InvalidParameter: too long"}
    make_records(engine, day, 5, changes={1: refused, 2: refused, 3: {"status": "PUBLISHED"}})
    text = re.sub(r"^-- .*$", "", (EXAMPLES / "records.sql").read_text(encoding="utf-8"), flags=re.MULTILINE)
    look, again = [statement.strip() for statement in text.split(";") if statement.strip()]
    with engine.begin() as connection:
        told = {(row.status, row.reason): row.records for row in connection.exec_driver_sql(look)}
        connection.exec_driver_sql(again)
        statuses = Counter(connection.execute(select(records.c.status)).scalars())
    assert told == {("PENDING", None): 2, ("PUBLISHED", None): 1, ("REFUSED", "InvalidParameter: too long"): 2}
    assert statuses == {"PENDING": 4, "PUBLISHED": 1}
