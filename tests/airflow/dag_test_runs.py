"""Runs the DAGs of `local_dags/` by `dag.test()`, each with a local worker, and prints as JSON what came of them.

A program of its own: `dag.test()` wants an Airflow whose metadata database and DAG folder are these DAGs' own.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import func, insert, select

from airflow_dbpartition import waiting
from airflow_dbpartition.testing import LocalJobRepository, local_job_repository, local_worker, run_pending
from airflow_dbpartition.worker import PartitionContext

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "docs" / "examples"
STEPS = str(HERE / "local_dags" / "steps_beside_dags.py")
MARK = "what came of them: "
PATIENCE_S = 400  # on a busy machine; a quiet one takes a tenth of it

sys.path.insert(0, str(HERE / "local_dags"))


def come_of(run: Any, jobs: LocalJobRepository) -> dict[str, Any]:
    return {
        "state": run.state,
        "tries": {ti.task_id: ti.try_number for ti in run.get_task_instances()},
        "summary": jobs.summary(),
        "results": jobs.results(),
        "errors": jobs.errors(),
        "report": jobs.report(),
        "of_each_job": [jobs.results(execution.job_execution_id) for execution in jobs.reading.recent()],
    }


@contextmanager
def greeting_when_awaited() -> Iterator[Callable[[PartitionContext], str]]:
    """A step that ends once a task has looked for its end: the first look never finds everything done."""
    looked = threading.Event()
    look = waiting.look

    def look_and_tell(*arguments: Any, **options: Any) -> waiting.Verdict:
        verdict = look(*arguments, **options)
        looked.set()
        return verdict

    def greet_when_awaited(ctx: PartitionContext) -> str:
        assert looked.wait(60)
        return f"Hello, {ctx.context['person']}!"

    with patch.object(waiting, "look", look_and_tell):
        yield greet_when_awaited


def run_with_worker(dag: Any) -> dict[str, Any]:
    with (
        greeting_when_awaited() as step,
        local_worker(tempfile.mkdtemp(dir="."), [STEPS], steps={"greet_when_awaited": step}) as jobs,
    ):
        return come_of(dag.test(), jobs)


def run_without_worker(dag: Any) -> dict[str, Any]:
    with local_job_repository(tempfile.mkdtemp(dir=".")) as jobs:
        before = come_of(dag.test(), jobs)
        attempts = run_pending(jobs, imports=[STEPS])
        return {"before": before, "attempts": attempts, "summary": jobs.summary()}


def run_chunks_and_pages(dag: Any) -> dict[str, Any]:
    files = [str(EXAMPLES / "chunks.py"), str(EXAMPLES / "orders.py")]
    with local_worker(tempfile.mkdtemp(dir="."), imports=files, concurrency=2) as jobs:
        import chunks  # type: ignore[import-not-found]
        import orders  # type: ignore[import-not-found]

        chunks.metadata.create_all(jobs.engine)
        orders.metadata.create_all(jobs.engine)
        with jobs.engine.begin() as connection:
            amounts = {3: "", 7: "three euros"}
            lines = [{"id": number, "amount": amounts.get(number, "1.25")} for number in range(1, 1201)]
            connection.execute(insert(chunks.lines), lines)
            cents = [{"id": number, "cents": -5 if number % 100 == 0 else 5} for number in range(1, 1201)]
            connection.execute(insert(orders.orders), cents)
        run = dag.test()
        with jobs.engine.connect() as connection:
            booked = connection.execute(select(func.count(), func.sum(chunks.booked.c.cents))).one()
            found = connection.execute(select(func.count()).select_from(orders.findings)).scalar_one()
        return {
            **come_of(run, jobs),
            "booked": list(booked),
            "findings": found,
            "added_up": run.get_task_instance("add_up").xcom_pull(task_ids="add_up"),
            "chunks": jobs.summary("chunks_and_pages.book"),
            "pages": jobs.summary("chunks_and_pages.check"),
        }


def main() -> None:
    import local_dags  # type: ignore[import-not-found]
    from airflow.dag_processing.dagbag import DagBag

    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    special: dict[str, Callable[[Any], dict[str, Any]]] = {
        "only_plans": run_without_worker,
        "chunks_and_pages": run_chunks_and_pages,
    }
    came: dict[str, Any] = {}
    for name, dag in [(name, dag) for name, dag in vars(local_dags).items() if type(dag).__name__ == "DAG"]:
        began = time.monotonic()
        came[name] = special.get(name, run_with_worker)(dag)
        came[name]["took_s"] = time.monotonic() - began
    came["all_files"] = {"import_errors": DagBag().import_errors}
    print(MARK + json.dumps(came))


if __name__ == "__main__":
    main()
