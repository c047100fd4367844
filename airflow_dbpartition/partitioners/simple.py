"""SimplePartitioner: as many numbered partitions as the grid has places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.partitioners.base import BoundPartitioner


class SimplePartitioner(BoundPartitioner):
    """`grid_size` partitions with the context `{"partition": i, "partitions": n}`, for steps that cut for themselves.

    A step selects its slice with, for instance, `id % partitions = partition`.
    """

    template_fields: ClassVar[Sequence[str]] = ()

    def partition(self, grid_size: int) -> Iterator[Partition]:
        for index in range(grid_size):
            yield Partition(f"partition{index}", {"partition": index, "partitions": grid_size})
