"""The table of clicks as a page: what tests/airflow/semantics/table.py says, and each cell of it is a test there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.airflow.semantics.cells import Row
from tests.airflow.semantics.table import TABLE
from tests.airflow.semantics.ways import WAYS, Way

INTRODUCTION = """\
A task has to do with an execution in one of six ways:

* **operator, blocking**: `PartitionedStepOperator(wait_for_completion=True, deferrable=False)`
* **operator, deferred**: `PartitionedStepOperator(wait_for_completion=True, deferrable=True)`
* **operator, not waiting**: `PartitionedStepOperator()`; it is a success once the plan is written
* **sensor, poke**; **sensor, reschedule**; **sensor, deferred**: `PartitionCompletionSensor`, in the operator's DAG run

Whatever happens: no two executions of a job are active at once, no partition is done twice or lost, no task succeeds by
itself over partitions that failed or were stopped, and no healthy execution is stopped when another process takes over.

Each combination of an event and a way is a test that clicks in a real Airflow, or kills its processes: `make semantics`
runs all of them, `make test` the dozen that matter most.
"""


def tables() -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, heads, rows) of each chapter."""
    for chapter in TABLE:
        rows = [row for event in chapter.rows for row in _rows(event)]
        yield chapter.title, ["event", "task", "what it leads to"], rows


def _rows(event: Row) -> Iterator[list[str]]:
    """One row for each different cell; ways that have the same share one."""
    title = event.title
    for words in dict.fromkeys(event.cells[way].words for way in WAYS):
        ways = [way for way in WAYS if event.cells[way].words == words]
        exists = event.cells[ways[0]].proof is not None
        yield [title, _named(ways), words if exists else f"– ({words})"]
        title = ""


def _named(ways: Sequence[Way]) -> str:
    """Such as "operator: blocking, deferred; sensor: poke"."""
    if len(ways) == len(WAYS):
        return "all"
    parts = []
    for kind in ("operator", "sensor"):
        of_kind = [way.title for way in WAYS if way.of == kind]
        named = [way.title for way in ways if way.of == kind]
        if named:
            parts.append(f"every {kind}" if named == of_kind else f"{kind}: {', '.join(named)}")
    return "; ".join(parts)
