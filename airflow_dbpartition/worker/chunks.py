"""Chunk-oriented steps: read, process, write, with one transaction a chunk (as Spring Batch's chunk step)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.engine import Connection

from airflow_dbpartition.errors import (
    ClaimLostError,
    ConfigurationError,
    DatabaseError,
    SchemaError,
    StepInterruptedError,
    UnskippableError,
)
from airflow_dbpartition.worker.context import PartitionContext
from airflow_dbpartition.worker.positions import decode_position, encode_position

CHUNK = "chunk"

# What tells of the world and not of the item: skipping one would lose every item until the world is well again.
INFRASTRUCTURE_ERRORS: tuple[type[BaseException], ...] = (
    OSError,  # connections, files, timeouts
    MemoryError,
    RecursionError,
    ImportError,
    ClaimLostError,
    StepInterruptedError,
    DatabaseError,
    SchemaError,
    sqlalchemy_errors.OperationalError,
    sqlalchemy_errors.InterfaceError,
    sqlalchemy_errors.TimeoutError,
    sqlalchemy_errors.InternalError,
)

Positioned = tuple[Any, Any]  # (item, position after it)


class KeysetReader:
    """Reads the rows of a query by key, page by page; restarts after the last committed key.

    Args:
        query: a select, or a function of the context that returns one; it must select `key`.
        key: a unique column.
        size: rows fetched at once.
    """

    def __init__(
        self,
        query: Select[Any] | Callable[[PartitionContext], Select[Any]],
        *,
        key: ColumnElement[Any],
        size: int = 1000,
    ) -> None:
        self._query = query
        self._key = key
        self._size = size

    def read_from(self, ctx: PartitionContext, position: Any) -> Iterator[Positioned]:
        """(row, key) for every row after `position` (None = from the start)."""
        query = self._query if isinstance(self._query, Select) else self._query(ctx)
        after = decode_position(position)
        while True:
            condition = self._key.is_not(None) if after is None else self._key > after
            with ctx.engine.connect() as connection:
                rows: Sequence[Row[Any]] = connection.execute(
                    query.where(condition).order_by(self._key).limit(self._size)
                ).all()
            if rows and self._key not in rows[0]._mapping:
                raise ConfigurationError(f"KeysetReader: the query must select its key, {self._key}")
            for row in rows:
                after = row._mapping[self._key]
                yield row, encode_position(after)
            if len(rows) < self._size:
                return


class ChunkStep:
    """A step that reads items, processes each, and writes them in chunks of one transaction each.

    Args:
        reader: a function of the context that returns an iterable of items (restarted by skipping as many as were
            committed, so its order must be stable; to skip what cannot be read it must go on after an error, which a
            generator cannot), or an object with `read_from(ctx, position)` such as
            `KeysetReader`.
        processor: item -> item to write, or None to filter it out; left out: items go through as they are.
        writer: called with (items) or (items, connection); writes through `connection` commit with the chunk.
        chunk_size: items read for one transaction, at least 1.
        skip: error types that say "this item is bad"; connection, operating system and timeout errors may not be
            among them, nor types so general that they include those.
        skip_limit: how many items of one partition may be skipped, in reading, processing and writing together; one
            more fails it.
        on_skip: called with (item, error) for each skipped item; item is None where reading it failed.

    Raises:
        ConfigurationError: for a wrong argument.
    """

    def __init__(
        self,
        reader: Any,
        processor: Callable[[Any], Any] | None = None,
        writer: Callable[..., Any] | None = None,
        chunk_size: int = 100,
        *,
        skip: Sequence[type[Exception]] = (),
        skip_limit: int = 10,
        on_skip: Callable[[Any, Exception], Any] | None = None,
    ) -> None:
        if not callable(reader) and not hasattr(reader, "read_from"):
            raise ConfigurationError(f"expected reader to be a function or have read_from(), got {reader!r}")
        if writer is None or not callable(writer):
            raise ConfigurationError(f"expected writer to be a function of (items, connection), got {writer!r}")
        for name, value, least in (("chunk_size", chunk_size, 1), ("skip_limit", skip_limit, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"expected {name} to be an integer of at least {least}, got {value!r}")
        caller = sys._getframe(1)
        self.defined_at = f"{caller.f_globals.get('__name__')}:{caller.f_lineno}"  # tells it from every other one
        self.skip = _checked_skips(skip)
        self.skip_limit = skip_limit
        self.chunk_size = chunk_size
        self._reader = reader
        self._processor = processor
        self._write = _as_two_argument_writer(writer)
        self._on_skip = on_skip

    def __call__(self, ctx: PartitionContext) -> dict[str, int]:
        """Run on one partition; returns its counters."""
        source = self._source(ctx)
        while True:
            ctx.raise_if_stopping()
            chunk = self._read_chunk(ctx, source)
            if not chunk:
                break
            self._write_chunk(ctx, chunk)
        if ctx.counters.skip or ctx.counters.filter:
            ctx.checkpoint.save()  # the last reads may all have been skipped or filtered
        return vars(ctx.counters).copy()

    def _source(self, ctx: PartitionContext) -> Iterator[Positioned]:
        stored = ctx.checkpoint.get(CHUNK)
        if hasattr(self._reader, "read_from"):
            return iter(self._reader.read_from(ctx, stored))
        return _Counted(self._reader(ctx), done=stored or 0, bad=self.skip)

    def _read_chunk(self, ctx: PartitionContext, source: Iterator[Positioned]) -> list[Positioned]:
        chunk: list[Positioned] = []
        while len(chunk) < self.chunk_size:
            try:
                chunk.append(next(source))
            except StopIteration:
                break
            except self.skip as error:
                if _has_ended(source):
                    raise UnskippableError(
                        "an item could not be read, and none after it can be: an error ends a generator for good. "
                        "Read by an iterator that goes on (a class with __next__), or check items in the processor"
                    ) from error
                self._count_skip(ctx, None, error)
                continue
            ctx.counters.read += 1
        return chunk

    def _write_chunk(self, ctx: PartitionContext, chunk: list[Positioned]) -> None:
        """The whole chunk in one transaction; if a skippable error strikes in the writer, item by item."""
        ready = [(item, self._process(ctx, item)) for item, _ in chunk]
        try:
            self._commit(ctx, [out for _, out in ready if out is not _NOTHING], chunk[-1][1])
        except self.skip as error:
            if len(chunk) == 1:
                self._skip_item(ctx, chunk[0], error)
                return
            ctx.log.warning("chunk rolled back, writing its items one by one", error=repr(error), items=len(chunk))
            for (item, out), (_, position) in zip(ready, chunk, strict=True):
                try:
                    self._commit(ctx, [] if out is _NOTHING else [out], position)
                except self.skip as item_error:
                    self._skip_item(ctx, (item, position), item_error)

    def _process(self, ctx: PartitionContext, item: Any) -> Any:
        if self._processor is None:
            return item
        try:
            result = self._processor(item)
        except self.skip as error:
            self._count_skip(ctx, item, error)
            return _NOTHING
        if result is None:
            ctx.counters.filter += 1
            return _NOTHING
        return result

    def _commit(self, ctx: PartitionContext, items: list[Any], position: Any) -> None:
        with ctx.transaction() as connection:
            if items:
                self._write(items, connection)
            ctx.counters.write += len(items)
            ctx.checkpoint[CHUNK] = position

    def _skip_item(self, ctx: PartitionContext, positioned: Positioned, error: Exception) -> None:
        item, position = positioned
        self._count_skip(ctx, item, error)
        self._commit(ctx, [], position)

    def _count_skip(self, ctx: PartitionContext, item: Any, error: Exception) -> None:
        if ctx.counters.skip >= self.skip_limit:
            raise UnskippableError(
                f"more than skip_limit = {self.skip_limit} items would be skipped; the last error was "
                f"{type(error).__name__}: {error}"
            ) from error
        ctx.counters.skip += 1
        ctx.log.warning("item skipped", error=f"{type(error).__name__}: {error}", skipped=ctx.counters.skip)
        if self._on_skip is not None:
            self._on_skip(item, error)


class _Counted:
    """A reader's items with their number, from behind the first `done`; unlike a generator it survives an error."""

    def __init__(self, items: Iterable[Any], *, done: int, bad: tuple[type[Exception], ...]) -> None:
        self.items = iter(items)
        self._count = 0
        while self._count < done:
            try:
                next(self)
            except StopIteration:
                return
            except bad:
                if _has_ended(self):
                    raise
                # Skipped and counted by the attempt that came this far.

    def __iter__(self) -> Iterator[Positioned]:
        return self

    def __next__(self) -> Positioned:
        item = next(self.items)
        self._count += 1
        return item, self._count


def _has_ended(source: Iterator[Any]) -> bool:
    """Whether the source is a generator that has ended, though it has not said so yet."""
    items = source.items if isinstance(source, _Counted) else source
    return inspect.isgenerator(items) and items.gi_frame is None


_NOTHING = object()


def _checked_skips(skip: Sequence[type[Exception]]) -> tuple[type[Exception], ...]:
    kinds = tuple(skip)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"expected skip to hold exception types, got {kind!r}")
        for infrastructure in INFRASTRUCTURE_ERRORS:
            if issubclass(kind, infrastructure) or issubclass(infrastructure, kind):
                raise ConfigurationError(
                    f"skip may not hold {kind.__name__}: it {'is' if issubclass(kind, infrastructure) else 'includes'} "
                    f"{infrastructure.__name__}, which tells of the infrastructure and not of an item; "
                    "name the error of a bad item"
                )
    return kinds


def _as_two_argument_writer(writer: Callable[..., Any]) -> Callable[[list[Any], Connection], Any]:
    try:
        parameters = inspect.signature(writer).parameters.values()
    except (TypeError, ValueError):
        return writer
    kinds = [parameter.kind for parameter in parameters]
    positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) + kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    if positional >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return writer
    return lambda items, _connection: writer(items)
