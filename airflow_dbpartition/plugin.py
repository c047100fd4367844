"""What each of Airflow's processes loads of this package (entry point `airflow.plugins`): so, as little as can be."""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

from airflow_dbpartition import listener


class DbPartitionPlugin(AirflowPlugin):
    """The listener, and the pages, which only the API server asks for."""

    name = "dbpartition"
    listeners = [listener]  # noqa: RUF012 - Airflow's own declaration

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Built when asked for: FastAPI is not imported in a task's process."""
        from airflow_dbpartition.links import PAGES
        from airflow_dbpartition.ui import make_app

        return [{"app": make_app(), "url_prefix": PAGES, "name": "dbpartition"}]
