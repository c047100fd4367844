"""PartitionsLink: from a task to the page that shows its partitions."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

PAGES = "/dbpartition"  # where the plugin's pages are, below the API server's own address


def page_of(job_execution_id: int, repository_conn_id: str) -> str:
    """The address of the page, without the host: the UI and the page have the same one."""
    base = urlsplit(conf.get("api", "base_url", fallback="/")).path.rstrip("/")
    return f"{base}{PAGES}/{quote(repository_conn_id, safe='')}/executions/{job_execution_id}"


class PartitionsLink(BaseOperatorLink):
    """The button "Partitions" of a task, there from the moment at which the job execution is known."""

    name = "Partitions"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        """Called in the task's process when it ends or defers."""
        link: str = operator.partitions_link or ""
        return link
