"""s3_keys: the keys of one partition of an S3KeysPartitioner, listed again where it is a range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.partitioners.s3_keys import is_wanted


def s3_keys(context: Mapping[str, Any], client: Any, *, after: str | None = None) -> Iterator[str]:
    """The keys of a partition's objects, page by page; never more than a page of them in memory.

    Args:
        context: what an `S3KeysPartitioner` gave: one key, a list of keys, or a range of them.
        client: a boto3 client of S3; only asked where the context is a range.
        after: the last key that is done, as the step has kept it in its checkpoint; those up to it are left out.

    Raises:
        ConfigurationError: the context is of another partitioner.
        botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError: S3 refuses, or does not answer.
    """
    if "key" in context or "keys" in context:
        keys = sorted(context["keys"] if "keys" in context else [context["key"]])
        yield from (key for key in keys if after is None or key > after)
    elif "last_key" in context:
        yield from _listed(context, client, after)
    else:
        raise ConfigurationError(
            f"expected the context of an S3KeysPartitioner (key, keys or last_key), got one with {sorted(context)}"
        )


def _listed(context: Mapping[str, Any], client: Any, after: str | None) -> Iterator[str]:
    begin = max(context["start_after"] or "", after or "")
    asked: dict[str, Any] = {"Bucket": context["bucket"], "Prefix": context["prefix"]}
    if begin:
        asked["StartAfter"] = begin
    wanted: dict[str, Any] = {
        "suffixes": tuple(context["suffix"]),
        "min_size_bytes": context["min_size_bytes"],
    }
    for page in client.get_paginator("list_objects_v2").paginate(**asked):
        for listed in page.get("Contents", ()):
            key = str(listed["Key"])
            if key > context["last_key"]:
                return
            if is_wanted(key, int(listed["Size"]), **wanted):
                yield key
