"""The plugin's pages: for people who are logged in to Airflow, and may see the DAG that launched the execution."""

from airflow_dbpartition.ui.pages import make_app

__all__ = ["make_app"]
