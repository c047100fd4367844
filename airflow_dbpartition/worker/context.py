"""What a step is given: its input, and the ways to read, write, remember and stop."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Row, Select
from sqlalchemy.engine import Connection, Engine

from airflow_dbpartition.domain import Claim, Counters
from airflow_dbpartition.errors import ConfigurationError, StepInterruptedError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.storable import JsonObject, check_json
from airflow_dbpartition.worker.logs import ids_of
from airflow_dbpartition.worker.positions import decode_position, encode_position

KEYSET = "keyset"
_SECOND_TRANSACTION = (
    "a page of read_keyset was given a second ctx.transaction(): its position was committed with the first. "
    "Write each page in one transaction (or read smaller pages)"
)
LARGEST_COUNT = 2**63 - 1  # what the columns hold


class Checkpoint(dict[str, Any]):
    """Where the step has got to: a JSON object, kept over attempts and restarts.

    Change it like a dict inside `ctx.transaction()`, and it is committed with the transaction. Call it to replace
    and save it at once: `ctx.checkpoint({"page": 3})`.
    """

    def __init__(self, values: Mapping[str, Any], save: Callable[[], None]) -> None:
        super().__init__(values)
        self._save = save

    def __call__(self, values: Mapping[str, Any]) -> None:
        self.clear()
        self.update(values)
        self.save()

    def save(self) -> None:
        """Write it now; inside `ctx.transaction()` it is written with that transaction anyway.

        Raises:
            ClaimLostError: the partition is no longer ours.
        """
        self._save()


@dataclass
class _Page:
    """The page of `read_keyset` that the step is at."""

    name: str
    before: Any  # the position that stands until the page is done
    after: Any
    committed: bool = False
    refused: bool = False


class PartitionContext:
    """One attempt at one partition, as the step sees it.

    Attributes:
        context: the execution context: the input that the partitioner gave.
        partition_key, step_name, job_name, job_execution_id, attempt, node_id: who and what this is.
        job_instance_id: the same over attempts and restarts; another where the job is done all over again.
        counters: read, write, filter, skip, commit, rollback; committed with each transaction.
        checkpoint: see `Checkpoint`.
        log: a structlog logger that carries the ids.
    """

    def __init__(self, claim: Claim, repository: JobRepository, stopping: Callable[[], bool]) -> None:
        self._claim = claim
        self._repository = repository
        self._stopping = stopping
        self._process_id = os.getpid()
        self._open: Connection | None = None
        self._page: _Page | None = None
        self.context: JsonObject = claim.context
        self.counters = Counters(**vars(claim.counters))
        self.checkpoint = Checkpoint(claim.checkpoint or {}, self._save_checkpoint)
        self.partition_key = claim.partition_key
        self.step_name = claim.step_name
        self.job_name = claim.job_name
        self.job_execution_id = claim.job_execution_id
        self.job_instance_id = claim.job_instance_id
        self.attempt = claim.attempt
        self.node_id = claim.node_id

    @property
    def log_ids(self) -> dict[str, object]:
        """What every line that the step logs carries."""
        return {**ids_of(self._claim), "node_id": self.node_id}

    @cached_property
    def log(self) -> Any:
        """A structlog logger that carries the ids."""
        return structlog.get_logger("dbpartition.step").bind(**self.log_ids)

    @property
    def idempotency_key(self) -> str:
        """A text that is the same over attempts and restarts of this partition, and different for every other."""
        return self._claim.idempotency_key

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine of the job repository's database, for reading; write through `transaction()`."""
        return self._repository.engine

    @property
    def should_stop(self) -> bool:
        """Whether the step is asked to end: its execution is stopped, its node leaves, or its claim is lost."""
        return self._stopping()

    @property
    def is_forked_copy(self) -> bool:
        """Whether the step has forked, and this is the copy."""
        return os.getpid() != self._process_id

    def raise_if_stopping(self) -> None:
        """End the step here if it is asked to stop.

        Raises:
            StepInterruptedError: it is.
        """
        if self.should_stop:
            raise StepInterruptedError(f"partition {self.partition_key!r} was asked to stop")

    def checked_counters(self) -> Counters:
        """The counters as they can be stored.

        Raises:
            TypeError: the step has put something there that is no count.
        """
        counters: object = self.counters
        if not isinstance(counters, Counters):
            raise TypeError(f"expected ctx.counters to be the Counters that the step was given, got {counters!r:.100}")
        checked = {}
        for name, value in vars(counters).items():
            if type(value) is int and -LARGEST_COUNT <= value <= LARGEST_COUNT:
                checked[name] = value
                continue
            try:
                checked[name] = operator.index(value)
            except TypeError:
                checked[name] = LARGEST_COUNT + 1
            if not -LARGEST_COUNT <= checked[name] <= LARGEST_COUNT:
                raise TypeError(f"expected ctx.counters.{name} to be a whole number below 2**63, got {value!r:.100}")
        return Counters(**checked)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction on the job repository's database: your writes, checkpoint and counters, or nothing of it.

        At its end the partition's row is updated under the fence. A worker that has lost its claim, without knowing,
        is rolled back there: that is what makes effects in this database exactly once.

        Raises:
            ClaimLostError: the partition is no longer ours; everything in the block was rolled back.
            ConfigurationError: a transaction is open already, a page of `read_keyset` had one before, or the step has
                forked and this is the copy: the claim is one process's, or its effects would stand twice.
        """
        self._refuse_forked_copy()
        if self._open is not None:
            raise ConfigurationError("ctx.transaction() is open already: use its connection, or end it first")
        self._refuse_second_of_page()
        checkpoint, counters = dict(self.checkpoint), vars(self.counters).copy()
        try:
            with self._repository.engine.connect() as connection, connection.begin():
                self._open = connection
                yield connection
                self.counters.commit += 1
                self._store(connection)
        except BaseException:
            # What the row holds is what we hold: the block's progress is undone here as it is there.
            self.checkpoint.clear()
            self.checkpoint.update(checkpoint)
            for name, value in counters.items():
                setattr(self.counters, name, value)
            self.counters.rollback += 1
            raise
        finally:
            self._open = None
        if self._page is not None:
            self._page.committed = True

    def read_keyset(
        self,
        query: Select[Any],
        *,
        key: ColumnElement[Any],
        size: int = 1000,
        name: str = KEYSET,
        engine: Engine | None = None,
    ) -> Iterator[Sequence[Row[Any]]]:
        """Read a query page by page, by key and never by offset, from where the checkpoint stands.

        Each page's position is committed by the one `ctx.transaction()` that the loop's body opens for it (or, if it
        opens none, saved when the next page is asked for). So write each page in a single transaction.

        Args:
            query: what to read; it must select `key`, and is ordered and limited here.
            key: a unique column; rows where it is NULL are not read.
            size: rows a page.
            name: the checkpoint's entry, where one step reads more than one query.
            engine: where to read; None = the job repository's database.

        Raises:
            ConfigurationError: for a query without the key, a size below 1, or while another query is read.
            StepInterruptedError: between two pages, when the step is asked to stop.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError(f"expected read_keyset size to be an integer of at least 1, got {size!r}")
        before = self.checkpoint.get(name)
        position = decode_position(before)
        source = engine or self._repository.engine
        while True:
            self.raise_if_stopping()
            if self._page is not None:
                raise ConfigurationError(
                    f"read_keyset: {name!r} is read while a page of {self._page.name!r} is open, which would be taken "
                    "for done: read one query after the other, or what belongs to a page by a query of your own"
                )
            page_query = query.where(key.is_not(None) if position is None else key > position)
            with source.connect() as connection:
                page = connection.execute(page_query.order_by(key).limit(size)).all()
            if not page:
                return
            if key not in page[0]._mapping:
                raise ConfigurationError(f"read_keyset: the query must select its key, {key}")
            position = page[-1]._mapping[key]
            at = self._page = _Page(name, before, encode_position(position))
            self.counters.read += len(page)
            self._stand_at(name, at.after)
            try:
                yield page
            finally:
                self._page = None
            if at.refused:
                raise ConfigurationError(_SECOND_TRANSACTION)
            before = at.after
            self._stand_at(name, at.after)
            if not at.committed:
                self.checkpoint.save()
            if len(page) < size:
                return

    def _refuse_forked_copy(self) -> None:
        if self.is_forked_copy:
            raise ConfigurationError(
                f"process {os.getpid()} is a forked copy of process {self._process_id}, which runs partition "
                f"{self.partition_key!r} and alone may write transactions and checkpoint: hand it the copy's results, "
                "or write them by an engine of your own"
            )

    def _refuse_second_of_page(self) -> None:
        if self._page is None or not self._page.committed:
            return
        self._page.committed, self._page.refused = False, True
        self._stand_at(self._page.name, self._page.before)
        self.checkpoint.save()  # better this page twice than its rest never
        raise ConfigurationError(_SECOND_TRANSACTION)

    def _stand_at(self, name: str, position: Any) -> None:
        if position is None:
            self.checkpoint.pop(name, None)
        else:
            self.checkpoint[name] = position

    def _save_checkpoint(self) -> None:
        if self._open is not None:
            return  # goes with the open transaction
        with self._repository.engine.connect() as connection, connection.begin():
            self._store(connection)

    def _store(self, connection: Connection) -> None:
        self._refuse_forked_copy()
        values = dict(self.checkpoint)
        if self._page is not None:  # what the step saves in the middle of a page does not say that the page is done
            done = self._open is not None or self._page.committed
            values[self._page.name] = self._page.after if done else self._page.before
            if values[self._page.name] is None:
                del values[self._page.name]
        checked = check_json(values, "checkpoint")
        self._repository.settlements.checkpoint(
            connection, self._claim, checkpoint=checked, counters=self.checked_counters()
        )
