"""The plugin's page: what it shows, to whom, and what it does with strange addresses."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.ui import make_app, pages
from airflow_dbpartition.ui.access import logged_in, may_see
from tests.airflow.test_tries import execute, operator
from tests.airflow.worlds import Try
from tests.scenarios import add_node, claim, fail_all, submit

SOMEBODY = object()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The DAGs for which Airflow was asked whether somebody may see them; all but `secret` may be."""
    dags: list[str | None] = []

    def answer(dag_id: str | None, _request: Any, user: Any) -> None:
        assert user is SOMEBODY
        dags.append(dag_id)
        if dag_id == "secret":
            raise HTTPException(403, "Forbidden")

    monkeypatch.setattr(pages, "may_see", answer)
    return dags


@pytest.fixture
def client(asked: list[str | None]) -> TestClient:
    app: FastAPI = make_app()
    app.dependency_overrides[logged_in] = lambda: SOMEBODY
    return TestClient(app)


def test_it_shows_counts_failures_and_partitions_and_trusts_no_text(
    connected: JobRepository, client: TestClient, asked: list[str | None]
) -> None:
    add_node(connected)
    job_execution_id = execute(operator(partitioner={"<b>one": {}, "two": {}}), Try())
    fail_all(connected, job_execution_id, message="<script>alert(1)</script>")
    got = client.get(f"/repo/executions/{job_execution_id}")
    assert got.status_code == 200
    assert asked == ["dag"]
    for words in ("dag.task is FAILED", "FAILED: 2", "&lt;b&gt;one", "&lt;script&gt;alert(1)"):
        assert words in got.text
    for words in ("<script>", "<b>one", 'http-equiv="refresh"'):
        assert words not in got.text


def test_while_it_runs_it_is_loaded_again_and_one_status_can_be_chosen(
    connected: JobRepository, client: TestClient
) -> None:
    add_node(connected)
    job_execution_id = execute(operator(partitioner={"waits": {}, "runs": {}}), Try())
    (running,) = claim(connected)
    page = client.get(f"/repo/executions/{job_execution_id}?status=CLAIMED").text
    assert 'http-equiv="refresh"' in page
    assert (f"<td>{running.partition_key}</td>" in page, page.count("<td>PENDING</td>")) == (True, 0)


def test_many_partitions_are_shown_page_by_page(
    connected: JobRepository, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)
    add_node(connected)
    job_execution_id = execute(operator(partitioner={f"p{n}": {} for n in range(5)}), Try())
    address, seen = f"/repo/executions/{job_execution_id}?", []
    while True:
        page = client.get(address).text
        seen += [key for key in (f"p{n}" for n in range(5)) if f"<td>{key}</td>" in page]
        if "after=" not in page:
            break
        address = f"/repo/executions/{job_execution_id}?after={page.split('after=')[1].split(chr(34))[0]}"
    assert seen == [f"p{n}" for n in range(5)]


def test_who_may_not_see_the_dag_of_the_row_is_refused_whatever_the_address_says(
    connected: JobRepository, client: TestClient
) -> None:
    add_node(connected)
    job_execution_id = execute(operator(), Try(dag_id="secret"))
    got = client.get(f"/repo/executions/{job_execution_id}?dag_id=dag")
    assert (got.status_code, "secret" in got.text) == (403, False)


def test_a_job_that_no_dag_has_launched_is_not_shown_here(connected: JobRepository) -> None:
    submit(connected, 1)
    with pytest.raises(HTTPException, match="no DAG has launched"):
        may_see(None, None, SOMEBODY)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["/repo/executions/99", "/nowhere/executions/1"])
def test_what_is_not_there_is_not_found(connected: JobRepository, client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 404


@pytest.mark.parametrize(
    "address", ["/repo/executions/x", "/repo/executions/1?status=LOST", "/repo/executions/1?after=-1"]
)
def test_a_strange_address_is_refused(connected: JobRepository, client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 422


@pytest.mark.parametrize("address", ["/docs", "/redoc", "/openapi.json"])
def test_fastapis_own_pages_are_not_served(client: TestClient, address: str) -> None:
    assert client.get(address).status_code == 404
