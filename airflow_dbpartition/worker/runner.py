"""Running one claimed partition in this process, and what came of it. Nothing that a step does escapes as an error."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from airflow_dbpartition.domain import Claim, Counters
from airflow_dbpartition.errors import ClaimLostError, StepInterruptedError
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.storable import (
    DEFAULT_CONTEXT_LIMIT_BYTES,
    JsonObject,
    NotStorableError,
    check_json,
    dump_json,
    storable_text,
)
from airflow_dbpartition.worker.context import PartitionContext
from airflow_dbpartition.worker.steps import find_step

COMPLETED = "completed"
FAILED = "failed"
INTERRUPTED = "interrupted"
UNSTARTED = "unstarted"
LOST = "lost"

FORKED_COPY = 70  # exit code: a copy that the step forked came back from it


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt: `kind` is completed, failed, interrupted (asked to stop, and did), unstarted or lost.

    Counters come with completed only: what else is settled keeps those of its last transaction.
    """

    kind: str
    message: str = ""
    result: Any = None
    counters: Counters = field(default_factory=Counters)

    def to_json(self) -> JsonObject:
        return {**vars(self), "counters": vars(self.counters)}

    @classmethod
    def from_json(cls, value: JsonObject) -> Outcome:
        return cls(value["kind"], value["message"], value["result"], Counters(**value["counters"]))


NOT_BEGUN = Outcome(UNSTARTED, "it had not begun")


def run_claim(claim: Claim, repository: JobRepository, stopping: Callable[[], bool]) -> Outcome:
    """Run the step on its partition.

    Args:
        claim: what to run.
        repository: on the job repository's database, without statement timeout: the user's transactions run there.
        stopping: whether the step is asked to end.
    """
    ctx = PartitionContext(claim, repository, stopping)
    # A context of its own: this thread goes on to other partitions, which must not see what this one has set.
    outcome = contextvars.copy_context().run(_run, ctx)
    if ctx.is_forked_copy:  # after a forgotten os._exit: it is no worker, and has nobody to tell
        os._exit(FORKED_COPY)
    return outcome


def _run(ctx: PartitionContext) -> Outcome:
    structlog.contextvars.bind_contextvars(**ctx.log_ids)  # for the standard library's lines
    try:
        result = find_step(ctx.step_name)(ctx)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return Outcome(COMPLETED, result=_checked_result(result), counters=ctx.checked_counters())
    except ClaimLostError as error:
        return Outcome(LOST, str(error))
    except StepInterruptedError as error:
        return Outcome(INTERRUPTED, str(error))
    except SystemExit as error:
        return Outcome(FAILED, f"the step called sys.exit({error.code!r}); return instead")
    except BaseException as error:
        return Outcome(FAILED, describe(error))


def describe(error: BaseException) -> str:
    """The traceback of a step's error, always storable; its last line is the error itself."""
    try:
        return storable_text("".join(traceback.format_exception(error)).rstrip())
    except Exception as failure:  # an error whose own text cannot be made
        return f"{type(error).__name__} (its text could not be read: {type(failure).__name__})"


def _checked_result(result: Any) -> Any:
    if result is None:
        return None
    try:
        checked = check_json(result, "result")
    except NotStorableError as error:
        raise TypeError(f"the step returned what cannot be stored as JSON: {error}") from None
    except RecursionError:
        raise TypeError("the step returned a result that is nested too deeply, or contains itself") from None
    size = len(dump_json(checked).encode())
    if size > DEFAULT_CONTEXT_LIMIT_BYTES:
        raise ValueError(
            f"the step returned a result of {size} bytes; at most {DEFAULT_CONTEXT_LIMIT_BYTES} are stored. "
            "Write large results to a table or file and return where they are"
        )
    return checked
