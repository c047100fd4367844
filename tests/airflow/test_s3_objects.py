"""Objects of S3 as partitioners see them in Airflow: by the real S3Hook, against moto, or a paginator that counts."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("airflow.providers.amazon")
pytest.importorskip("moto")

import boto3
from airflow.providers.amazon.aws.hooks.s3 import S3Hook
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from airflow_dbpartition.errors import ConfigurationError, InvalidPartitionError
from airflow_dbpartition.hooks import AirflowEnvironment
from airflow_dbpartition.partitioners import Partition, S3KeysPartitioner, collect_partitions
from airflow_dbpartition.task_outcome import as_airflow_error
from airflow_dbpartition.worker import s3_keys

REGION = "eu-central-1"
ENVIRONMENT = AirflowEnvironment(cast(Any, None))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of moto's S3, which Airflow knows as the connection `aws`."""
    connection = {"conn_type": "aws", "login": "key", "password": "secret", "extra": {"region_name": REGION}}
    monkeypatch.setenv("AIRFLOW_CONN_AWS", json.dumps(connection))
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        client = boto3.client("s3", region_name=REGION)
        client.create_bucket(Bucket="landing", CreateBucketConfiguration={"LocationConstraint": REGION})
        yield client


def fill(s3: Any, **sizes: int) -> None:
    for name, size in sizes.items():
        s3.put_object(Bucket="landing", Key=f"in/{name}.csv", Body=b"x" * size)


def collect(grid_size: int = 4, **options: Any) -> list[Partition]:
    given = {"bucket": "landing", "prefix": "in/", "conn_id": "aws", **options}
    return collect_partitions(S3KeysPartitioner(**given), grid_size=grid_size, environment=ENVIRONMENT)


@pytest.mark.parametrize("options", [{}, {"bins": 2}, {"ranges": "grid"}], ids=str)
def test_every_object_is_found_by_the_hook_and_again_by_the_step(s3: Any, options: dict[str, Any]) -> None:
    fill(s3, **{"a": 5, "b b": 0, "ü+%/&": 9, "\U0001f6eb": 4, "z": 2})
    s3.put_object(Bucket="landing", Key="in/", Body=b"")
    s3.put_object(Bucket="landing", Key="out/x.csv", Body=b"xxx")
    partitions = collect(suffix=".csv", **options)
    seen = [key for partition in partitions for key in s3_keys(partition.context, s3)]
    assert sorted(seen) == sorted(f"in/{name}.csv" for name in ("a", "b b", "ü+%/&", "\U0001f6eb", "z"))
    assert sum(partition.weight for partition in partitions) == 20


def test_more_objects_than_a_page_holds_are_all_found(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    fill(s3, **{f"{number:03}": 1 for number in range(95)})
    assert len(list(s3.get_paginator("list_objects_v2").paginate(Bucket="landing"))) == 10
    partitions = collect(3, ranges="grid")
    keys = [list(s3_keys(partition.context, s3)) for partition in partitions]
    assert [key for some in keys for key in some] == [f"in/{number:03}.csv" for number in range(95)]
    assert [len(some) for some in keys] == [32, 31, 32]


# --- what S3 refuses -----------------------------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        collect(**options)
    message = str(caught.value)
    assert "\n" not in message
    assert type(as_airflow_error(caught.value)).__name__ == "AirflowFailException"
    return message


def test_a_missing_bucket_is_one_line_that_names_bucket_prefix_and_connection(s3: Any) -> None:
    assert refusal(bucket="landed").startswith(
        "bucket 'landed', prefix 'in/', connection 'aws': cannot list the objects: there is no such bucket ("
    )


def test_a_name_that_no_bucket_can_have_is_named(s3: Any) -> None:
    assert "bucket 's3://landing'" in refusal(bucket="s3://landing")


def test_a_missing_connection_is_not_replaced_by_other_credentials(s3: Any) -> None:
    fill(s3, a=1)
    assert "the Airflow connection 'other' is not defined" in refusal(conn_id="other")
    assert len(collect()) == 1


def test_without_a_connection_boto3_finds_the_credentials_itself(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(s3, a=1)
    assert len(collect(conn_id=None)) == 1


def test_a_provider_that_is_not_installed_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "airflow.providers.amazon.aws.hooks.s3", None)
    assert "pip install 'airflow-dbpartition[amazon]'" in refusal()


class Pages:
    """Stands for boto3's client: it lists very many objects, or fails, and never makes a page before it is asked."""

    def __init__(self, pages: int = 1, *, error: Exception | None = None, fails_at: int = 0) -> None:
        self.pages_made = 0
        self._pages = pages
        self._error = error
        self._fails_at = fails_at

    def get_paginator(self, operation: str) -> Pages:
        assert operation == "list_objects_v2"
        return self

    def paginate(self, **asked: Any) -> Iterator[dict[str, Any]]:
        for page in range(self._pages):
            if self._error is not None and page == self._fails_at:
                raise self._error
            self.pages_made += 1
            yield {
                "Contents": [
                    {"Key": f"in/year=2026/part-{page:05}-{number:04}.parquet", "Size": (number * 7919) % 5000}
                    for number in range(1000)
                ]
            }


def behind_the_hook(monkeypatch: pytest.MonkeyPatch, pages: Pages) -> Pages:
    monkeypatch.setattr(S3Hook, "get_conn", lambda self: pages)
    return pages


def said_by_s3(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "ListObjectsV2"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (said_by_s3("AccessDenied", 403), "the credentials lack the right s3:ListBucket"),
        (said_by_s3("PermanentRedirect", 301), "the bucket is in another region"),
        (said_by_s3("InvalidAccessKeyId", 403), "InvalidAccessKeyId"),
        (said_by_s3("SignatureDoesNotMatch", 403), "SignatureDoesNotMatch"),
    ],
    ids=lambda value: value.response["Error"]["Code"] if isinstance(value, ClientError) else "",
)
def test_what_has_to_be_changed_by_somebody_fails_the_task_at_once(
    s3: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    behind_the_hook(monkeypatch, Pages(error=error))
    message = refusal()
    assert message.startswith("bucket 'landing', prefix 'in/', connection 'aws': cannot list the objects")
    assert words in message


@pytest.mark.parametrize(
    "error",
    [
        said_by_s3("SlowDown", 503),
        said_by_s3("InternalError", 500),
        said_by_s3("Throttling", 400),
        EndpointConnectionError(endpoint_url="https://s3.example"),
    ],
    ids=lambda error: type(error).__name__ if not isinstance(error, ClientError) else error.response["Error"]["Code"],
)
def test_what_may_pass_leaves_the_task_its_retries(s3: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    behind_the_hook(monkeypatch, Pages(3, error=error, fails_at=2))
    with pytest.raises(InvalidPartitionError) as caught:
        collect(ranges=2)
    assert str(caught.value).startswith("bucket 'landing', prefix 'in/', connection 'aws': cannot list the objects (")
    assert type(as_airflow_error(caught.value)).__name__ == "AirflowException"


# --- very many objects ---------------------------------------------------------------------------------------------


def peak_of_planning(monkeypatch: pytest.MonkeyPatch, pages: int) -> int:
    """Bytes of Python objects at the most while ranges of so many thousand objects are planned."""
    listing = behind_the_hook(monkeypatch, Pages(pages))
    tracemalloc.start()
    try:
        partitions = collect(ranges=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert listing.pages_made == pages
    assert len(partitions) == 16
    assert sum(partition.context["objects"] for partition in partitions) == pages * 1000
    return peak


def test_planning_ranges_takes_no_more_memory_for_200_000_objects_than_for_5_000(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak_of_planning(monkeypatch, 1)  # what is imported and cached at the first time
    few = peak_of_planning(monkeypatch, 5)
    many = peak_of_planning(monkeypatch, 200)
    assert many < 1.25 * few
    assert many < 4_000_000


def test_a_step_that_pages_its_range_holds_one_page_at_a_time(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    behind_the_hook(monkeypatch, Pages(200))
    (partition,) = collect(ranges=1)
    listing = Pages(200)
    tracemalloc.start()
    try:
        count = sum(1 for _ in s3_keys(partition.context, listing))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 200_000
    assert peak < 2_000_000
