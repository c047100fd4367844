"""How a partitioner reaches databases, files and objects: from Airflow's connections, or from nothing but URLs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from airflow_dbpartition.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine


class FilePath(Protocol):
    """What is asked of a path: pathlib.Path has it, and so have universal_pathlib and ObjectStoragePath."""

    def glob(self, pattern: str, /) -> Iterable[Any]: ...
    def iterdir(self) -> Iterable[Any]: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def stat(self) -> Any: ...


class PartitionerEnvironment(Protocol):
    """Given to a partitioner by `bind` before it is asked for partitions."""

    def engine(self, conn_id: str | None) -> AbstractContextManager[Engine]:
        """A SQLAlchemy engine for the connection; None is the job repository's own database."""

    def path(self, url: str, conn_id: str | None) -> FilePath:
        """A path object for a local path or a URL."""

    def s3_objects(self, bucket: str, prefix: str, conn_id: str | None) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object of the bucket whose key begins so, in S3's order, listed page by page."""


class StandaloneEnvironment:
    """The environment outside Airflow: there are no connections, only URLs and local paths.

    Args:
        engine: the job repository's engine, for partitioners that name no other database.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    @contextmanager
    def engine(self, conn_id: str | None) -> Iterator[Engine]:
        if conn_id is not None:
            raise ConfigurationError(f"conn_id {conn_id!r} can only be looked up inside Airflow; give url= instead")
        if self._engine is None:
            raise ConfigurationError("no database to read from: give the partitioner a url=")
        yield self._engine

    def path(self, url: str, conn_id: str | None) -> FilePath:
        if conn_id is not None:
            raise ConfigurationError(
                f"conn_id {conn_id!r} can only be looked up inside Airflow; give a path that needs no connection"
            )
        if not is_remote(url):
            return local_path(url)
        raise ConfigurationError(
            f"expected a local path or a file:// URL outside Airflow, got {url!r}; other schemes need Airflow"
        )

    def s3_objects(self, bucket: str, prefix: str, conn_id: str | None) -> Iterator[tuple[str, int]]:  # noqa: ARG002
        raise ConfigurationError(f"bucket {bucket!r} can only be listed inside Airflow: by the S3Hook of its provider")


def is_remote(url: str) -> bool:
    """Whether it is a URL of anything but the local file system."""
    return "://" in url and not url.startswith("file://")


def local_path(url: str) -> Path:
    """The absolute path of a local path or file:// URL: workers have other working directories."""
    return Path(unquote(urlsplit(url).path) if url.startswith("file://") else url).absolute()
