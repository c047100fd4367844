"""What a task tells Airflow of a job beside its return value: metrics, asset events, the task's stored state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.observability import stats

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_dbpartition.storable import JsonObject

log = logging.getLogger(__name__)

STATE_KEY = "dbpartition"  # of the task_state_store
METRIC = "dbpartition.partitions"
_OUTCOMES = ("completed", "failed", "stopped")


def remember(context: Context, state: JsonObject) -> None:
    """Keep the state with the task, where Airflow's UI shows it; `dag.test()` may have no store."""
    store: Any = context.get("task_state_store")
    if store is None:
        return
    try:
        store.set(STATE_KEY, state)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not fail the task
        log.warning("the task's state was not stored in Airflow: %s", error)


def recalled(context: Context) -> Mapping[str, Any]:
    """What this task, in this try or an earlier one, has kept with `remember`; empty where that cannot be told."""
    store: Any = context.get("task_state_store")
    if store is None:
        return {}
    try:
        state = store.get(STATE_KEY)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("the task's state was not read from Airflow: %s", error)
        return {}
    return state if isinstance(state, Mapping) else {}


def report(context: Context, summary: Mapping[str, Any], *, outlets: Any = ()) -> None:
    """Say how a job has ended.

    Args:
        summary: of the job, as it goes through XCom.
        outlets: of the task; the event of each carries the summary as extra.
    """
    ti: Any = context["ti"]
    counts = summary["partitions"]
    for outcome in _OUTCOMES:
        if counts.get(outcome):
            tags = {"dag_id": ti.dag_id, "task_id": ti.task_id, "outcome": outcome}
            stats.incr(METRIC, counts[outcome], tags=tags)
    remember(context, dict(summary))
    events: Any = context.get("outlet_events")
    for outlet in outlets if events is not None else ():
        try:
            events[outlet].extra[STATE_KEY] = dict(summary)
        except (KeyError, TypeError, AttributeError):  # an alias, or a reference that Airflow resolves later
            log.debug("no event to add the counts to: %r", outlet)
