"""What Airflow's providers manager is told of this package (entry point `apache_airflow_provider`)."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGE = "airflow-dbpartition"


def get_provider_info() -> dict[str, Any]:
    """Metadata in the form of Airflow's provider.yaml; loaded by every Airflow process, so nothing is imported."""
    return {
        "package-name": _PACKAGE,
        "name": "dbpartition",
        "description": "Partitioned jobs, coordinated by nothing but a relational database.",
        "versions": [_version()],
        "connection-types": [
            {
                "connection-type": "dbpartition",
                "hook-class-name": "airflow_dbpartition.hooks.JobRepositoryHook",
                "hook-name": "Job repository (dbpartition)",
                "ui-field-behaviour": {
                    "hidden-fields": [],
                    "relabeling": {"schema": "Database"},
                    "placeholders": {"port": "5432", "schema": "dbpartition"},
                },
                "conn-fields": {
                    "dialect": {
                        "label": "Dialect",
                        "description": "The kind of database; PostgreSQL where it is left empty.",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["postgresql", "mysql", "mariadb", "sqlite"],
                        },
                    },
                    "dbpartition_schema": {
                        "label": "Schema of the tables",
                        "description": "Empty: the database's default schema.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "sslmode": {
                        "label": "TLS mode (PostgreSQL)",
                        "schema": {"type": ["string", "null"]},
                    },
                },
            }
        ],
        "task-decorators": [
            {"name": "partitioned_step", "class-name": "airflow_dbpartition.decorators.partitioned_step_task"}
        ],
        "extra-links": ["airflow_dbpartition.links.PartitionsLink"],
        "hooks": [{"integration-name": "dbpartition", "python-modules": ["airflow_dbpartition.hooks"]}],
        "operators": [{"integration-name": "dbpartition", "python-modules": ["airflow_dbpartition.operators"]}],
        "sensors": [{"integration-name": "dbpartition", "python-modules": ["airflow_dbpartition.sensors"]}],
        "triggers": [{"integration-name": "dbpartition", "python-modules": ["airflow_dbpartition.triggers"]}],
    }


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:  # run from a bare checkout
        return "0"
