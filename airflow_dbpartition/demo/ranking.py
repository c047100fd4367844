"""The aggregator of the DAG `punctual_carriers`: runs in Airflow, once, on the results of all partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def by_mean_delay(results: Iterator[tuple[str, Any]]) -> list[list[Any]]:
    """[carrier, mean delay in minutes], the most punctual first; carriers that never departed are left out.

    Args:
        results: partition key (the carrier) and the result of the step `carrier_delay`.
    """
    means = [
        (result["delay_minutes"] / result["departed"], carrier) for carrier, result in results if result["departed"]
    ]
    return [[carrier, round(mean, 2)] for mean, carrier in sorted(means)]
