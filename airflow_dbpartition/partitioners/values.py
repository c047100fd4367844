"""ListPartitioner: one partition for each of some known values, such as tenants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.errors import InvalidPartitionError
from airflow_dbpartition.partitioners.base import BoundPartitioner, to_json_value


class ListPartitioner(BoundPartitioner):
    """One partition for each value, named after it, or the values dealt to a number of bins.

    Args:
        values: scalars, whose context is `{context_name: value}`, or mappings, which are the contexts. Also the
            text of a JSON list, or an XCom, as a template yields them.
        key: for mappings: the field whose value is the partition's key.
        bins: number of partitions (or "grid": the grid size) to deal the values to, in turn; their context is
            `{"values": [...]}`. There are never more bins than values.
        context_name: the name of a scalar in its context.
    """

    template_fields: ClassVar[Sequence[str]] = ("values", "key", "bins", "context_name")

    def __init__(
        self,
        values: Any,
        *,
        key: str | None = None,
        bins: int | str | None = None,
        context_name: str = "value",
    ) -> None:
        self.values = values
        self.key = key
        self.bins = bins
        self.context_name = context_name
        self._required(values=[] if values == "" else values, context_name=context_name)

    def partition(self, grid_size: int) -> Iterator[Partition]:
        values = self._values()
        bins = self._bins(self.bins, grid_size)
        key_field = self._optional_text("key")
        keys = [self._key(item, index, key_field, bins is not None) for index, item in enumerate(values)]
        self._refuse_duplicates(keys)
        if bins is None:
            name = self._text("context_name")
            for key, item in zip(keys, values, strict=True):
                yield Partition(str(key), item if isinstance(item, Mapping) else {name: item})
            return
        for index in range(min(bins, len(values))):
            dealt = values[index::bins]
            yield Partition(f"bin{index}", {"values": dealt}, weight=len(dealt))

    def _values(self) -> list[Any]:
        values = self.values
        if isinstance(values, str):
            try:
                values = json.loads(values)
            except ValueError:
                raise self._error(f"expected values to be a list or the text of a JSON list, got {values!r}") from None
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise self._error(
                f"expected values to be a list or the text of a JSON list, got {type(values).__name__} {values!r}"
            )
        return [to_json_value(item) for item in values]

    def _key(self, item: Any, index: int, key_field: str | None, in_bins: bool) -> str | None:
        value = item
        if isinstance(item, Mapping):
            if key_field is None:
                if in_bins:
                    return None
                raise self._error("values are mappings: give key=, the field that names each partition")
            if key_field not in item:
                raise self._error(f"values[{index}] has no field {key_field!r}; it has {sorted(map(str, item))}")
            value = item[key_field]
        if value is None or isinstance(value, (list, Mapping)) or not str(value).strip():
            raise InvalidPartitionError(
                f"ListPartitioner: values[{index}] cannot name a partition: expected a number or some text, "
                f"got {value!r}"
            )
        return str(value).strip()

    def _refuse_duplicates(self, keys: list[str | None]) -> None:
        seen: set[str] = set()
        for key in keys:
            if key in seen:
                raise InvalidPartitionError(f"ListPartitioner: {key!r} stands more than once in values; list it once")
            if key is not None:
                seen.add(key)
