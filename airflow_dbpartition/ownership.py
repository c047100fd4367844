"""Who owns an execution on the Airflow side, and what a try says of itself: told by ids alone, without Airflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from airflow_dbpartition.storable import JsonObject


class TaskInstance(Protocol):
    """What is read of a running task instance."""

    id: Any
    dag_id: str
    run_id: str
    task_id: str
    map_index: int | None
    try_number: int
    max_tries: int


def owner_token(ti: TaskInstance) -> str:
    """The fence of stop requests: each try has another, and it stays over deferrals and reschedules of the try."""
    return str(ti.id)


def describe(ti: TaskInstance, *, retries: int) -> JsonObject:
    """What is stored of a try: who it was, where to find it in the UI, and how often it had been cleared."""
    path = f"/dags/{quote(ti.dag_id, safe='')}/runs/{quote(ti.run_id, safe='')}/tasks/{quote(ti.task_id, safe='')}"
    map_index = map_index_of(ti)
    return {
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": map_index,
        "try_number": ti.try_number,
        "max_tries": ti.max_tries,
        "retries": retries,
        "link": path if map_index < 0 else f"{path}/mapped/{map_index}",
    }


def map_index_of(ti: TaskInstance) -> int:
    """-1 for a task that is not mapped."""
    return -1 if ti.map_index is None else ti.map_index


def same_run(stored: Mapping[str, Any], ti: TaskInstance) -> bool:
    """Whether what is `stored` was written by a task of this task's own DAG run."""
    return stored.get("dag_id") == ti.dag_id and stored.get("run_id") == ti.run_id


def same_task(stored: Mapping[str, Any], ti: TaskInstance) -> bool:
    """Whether what is `stored` was written by a try of this very task instance."""
    return same_run(stored, ti) and stored.get("task_id") == ti.task_id and stored.get("map_index") == map_index_of(ti)


def was_cleared(stored: Mapping[str, Any], ti: TaskInstance, *, retries: int) -> bool:
    """Whether a person has cleared the task since what is `stored` was written, as opposed to a retry.

    A clear makes `max_tries` grow, a retry does not, and only growth counts: authors change `retries`, too. Where
    another task wrote what is stored, this try must be the first one after a clear.
    """
    known = stored.get("max_tries")
    if same_task(stored, ti) and isinstance(known, int):
        return ti.max_tries > known
    first_try = ti.max_tries - retries + 1
    return ti.try_number == first_try > 1
