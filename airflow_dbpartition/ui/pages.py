"""One page: a job execution, its counts, its failures and its partitions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from airflow_dbpartition.domain import PartitionStatus
from airflow_dbpartition.errors import ConfigurationError, DbPartitionError, JobExecutionNotFoundError
from airflow_dbpartition.hooks import JobRepositoryHook
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.ui.access import logged_in, may_see

log = logging.getLogger(__name__)

PAGE_ROWS = 200
NAMED_FAILURES = 20

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)


def make_app() -> FastAPI:
    """The application that Airflow mounts; every route asks who is there."""
    app = FastAPI(dependencies=[Depends(logged_in)], docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/{repository_conn_id}/executions/{job_execution_id}", execution, response_class=HTMLResponse)
    return app


def execution(
    request: Request,
    repository_conn_id: str,
    job_execution_id: int,
    user: Annotated[Any, Depends(logged_in)],
    status: Annotated[PartitionStatus | None, Query()] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> HTMLResponse:
    """The page of one execution; partitions page by page, of one status where one is chosen."""
    try:
        with JobRepositoryHook(repository_conn_id).repository() as repository:
            dag_id = repository.reading.execution(job_execution_id).manager.get("dag_id")
            may_see(dag_id, request, user)
            view = _view(repository, job_execution_id, status, after)
    except (ConfigurationError, JobExecutionNotFoundError):
        raise HTTPException(404, "there is no such job execution") from None
    except DbPartitionError as error:
        log.warning("a page could not be shown: %s", error)
        raise HTTPException(503, "the job repository does not answer; the API server's log says why") from None
    return HTMLResponse(
        _templates.get_template("execution.html").render(view),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"},
    )


def _view(
    repository: JobRepository, job_execution_id: int, status: PartitionStatus | None, after: int
) -> dict[str, Any]:
    reading = repository.reading
    found = reading.execution(job_execution_id)
    latest = reading.latest_of_instance(job_execution_id)
    progress = reading.progress([job_execution_id])[job_execution_id]
    rows = reading.partitions(
        job_execution_id, statuses=() if status is None else (status,), limit=PAGE_ROWS + 1, after=after
    )
    return {
        "execution": found,
        "latest_id": latest.job_execution_id,
        "progress": progress,
        "statuses": list(PartitionStatus),
        "chosen": status,
        "failures": reading.failures(job_execution_id, limit=NAMED_FAILURES),
        "partitions": rows[:PAGE_ROWS],
        "next_after": rows[PAGE_ROWS - 1].step_execution_id if len(rows) > PAGE_ROWS else None,
        "refresh_s": 5 if found.status.is_active and after == 0 else None,
    }
