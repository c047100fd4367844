"""A plan's partitions in a temporary file: a plan of millions is never held in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from tempfile import SpooledTemporaryFile
from types import TracebackType

from airflow_dbpartition.domain import Partition, TransferPolicy
from airflow_dbpartition.partitioners.collecting import StorablePartition
from airflow_dbpartition.storable import JsonText, dump_json

IN_MEMORY_BYTES = 8 * 1024 * 1024
_POLICIES = {policy.value: policy for policy in TransferPolicy}


class PartitionSpool(Collection[Partition]):
    """Partitions that can be counted and read again, in their order, one reader at a time.

    The partitioner is asked before anything is written: what it does may take long, and no transaction waits for it.

    Args:
        partitions: as `checked_partitions` yields them.
    """

    def __init__(self, partitions: Iterable[StorablePartition]) -> None:
        # Bytes: a file of text would work out after each line how large it has become.
        self._file = SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115  # closed by `close`
        self._count = 0
        self._weights: set[float] = set()  # the first two that differ
        try:
            for key, _context, context_json, weight, policy in partitions:
                # In JSON neither a tab nor the end of a line stands for itself.
                self._file.write(f"{dump_json(key)}\t{context_json}\t{weight!r}\t{policy.value}\n".encode())
                self._count += 1
                if len(self._weights) < 2:
                    self._weights.add(weight)
        except BaseException:
            self.close()
            raise

    @property
    def is_uniform(self) -> bool:
        """Whether all weigh the same."""
        return len(self._weights) < 2

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Partition]:
        self._file.seek(0)
        for line in self._file:
            key, context, weight, policy = line.decode().split("\t")
            yield Partition(json.loads(key), JsonText(context), float(weight), _POLICIES[policy[:-1]])

    def __contains__(self, partition: object) -> bool:
        return any(one == partition for one in self)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> PartitionSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
