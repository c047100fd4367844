"""Who may look: Airflow's own rules, which a plugin's application does not inherit. Without them nobody may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Request

try:  # Airflow does not promise these names: where they are missing, every page is refused
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api.security import get_user, requires_access_dag

    logged_in: Callable[..., Any] = get_user
    """A dependency: the user, or 401."""
except ImportError:  # a future Airflow

    def logged_in() -> None:
        raise HTTPException(503, "this version of Airflow has no access rules that airflow-dbpartition knows")


def may_see(dag_id: str | None, request: Request, user: Any) -> None:
    """Refuse who may not see the task instances of the DAG.

    Args:
        dag_id: as it is stored with the execution, never as the request says. A job that no DAG has launched (None) has
            no rule here: it is shown by the command line alone.

    Raises:
        HTTPException: 403.
    """
    if dag_id is None:
        raise HTTPException(403, "no DAG has launched this job execution: see it by `dbpartition job`")
    requires_access_dag("GET", DagAccessEntity.TASK_INSTANCE, dag_id)(request, user)
