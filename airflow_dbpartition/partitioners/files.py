"""FilesPartitioner: one partition a file, or files packed into bins of about the same number of bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from airflow_dbpartition.domain import Partition
from airflow_dbpartition.partitioners.base import BoundPartitioner
from airflow_dbpartition.partitioners.environment import is_remote, local_path
from airflow_dbpartition.partitioners.packing import Sized, pack, partition_key_of


class FilesPartitioner(BoundPartitioner):
    """One partition for each file, with the context `{"file": path, "size": bytes}` and its size as the weight.

    Args:
        path: the directory, as text or a path object, or a URL of one (other than file:// only inside Airflow).
        pattern: which files, as in pathlib's glob.
        recursive: look in all directories below, too.
        bins: number of partitions (or "grid": the grid size) to pack the files into, balanced by size, the largest
            first; their context is `{"files": [...], "size": bytes}`. There are never more bins than files.
        required: fail when no file matches, where otherwise the step ends well with no partitions.
        conn_id: Airflow connection of an object store.
        context: further values for the context of every partition.

    A local directory that is missing is an error. An object store has no directories: nothing there is no file.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "path",
        "pattern",
        "recursive",
        "bins",
        "required",
        "conn_id",
        "context",
    )

    def __init__(
        self,
        path: Any,
        *,
        pattern: str = "*",
        recursive: bool | str = False,
        bins: int | str | None = None,
        required: bool | str = False,
        conn_id: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self._required(path=path, pattern=pattern)
        is_path = hasattr(path, "glob")  # of pathlib, universal_pathlib or Airflow
        self.path = str(path) if is_path else path
        self.pattern = pattern
        self.recursive = recursive
        self.bins = bins
        self.required = required
        self.conn_id = conn_id or (getattr(path, "conn_id", None) if is_path else None)
        self.context = context

    def partition(self, grid_size: int) -> Iterator[Partition]:
        bins = self._bins(self.bins, grid_size)
        files = self._files()
        if not files and self._flag("required"):
            raise self._error(
                f"no file matches {self.pattern!r} in {self.path!r}; with required=False that is no error"
            )
        if bins is None:
            for file in files:
                context = self._context({"file": file.place, "size": file.size_bytes})
                yield Partition(partition_key_of(file.name), context, weight=file.size_bytes)
            return
        for index, packed in enumerate(pack(files, bins)):
            size = sum(file.size_bytes for file in packed)
            context = self._context({"files": [file.place for file in packed], "size": size})
            yield Partition(f"bin{index}", context, weight=size)

    def _files(self) -> list[Sized]:
        url = self._text("path")
        base = self.environment.path(url, self._optional_text("conn_id"))
        if not base.is_dir():
            if base.is_file():
                raise self._error(f"{url!r} is a file; give its directory, and its name as pattern=")
            if is_remote(url):
                return []
            raise self._error(f"there is no directory {url!r} ({local_path(url)}) on this machine; correct path=")
        found: dict[str, Sized] = {}
        for file in self._glob(base):
            try:
                if not file.is_file():
                    continue
                size_bytes = int(file.stat().st_size)
            except FileNotFoundError:  # went away since it was listed
                continue
            key = str(file).removeprefix(str(base)).replace(os.sep, "/").lstrip("/")
            found[key] = Sized(key, str(file), size_bytes)
        return [found[key] for key in sorted(found)]

    def _glob(self, base: Any) -> Iterator[Any]:
        pattern = self._text("pattern")
        if self._flag("recursive") and "**" not in pattern:
            pattern = f"**/{pattern}"
        try:
            yield from base.glob(pattern)
        except (NotImplementedError, ValueError) as error:
            raise self._error(f"expected pattern to be relative to path, got {self.pattern!r} ({error})") from error
