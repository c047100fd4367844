"""Tests of the tutorial's DAG, `dags/tutorial_greetings.py`, by `dag.test()` and a worker in this process."""

from __future__ import annotations

# [start success]
from pathlib import Path

from airflow.dag_processing.dagbag import DagBag

from airflow_dbpartition.testing import local_job_repository, local_worker, run_pending
from airflow_dbpartition.worker import PartitionContext

dag = DagBag().dags["tutorial_greetings"]


def test_everybody_is_greeted(tmp_path: Path) -> None:
    with local_worker(tmp_path, imports=["greetings"]) as jobs:
        run = dag.test()
        assert run.state == "success", jobs.report()
        assert jobs.summary()["partitions"]["completed"] == 3
        assert jobs.results()["Ada"] == {"greeting": "Hello, Ada!"}


# [end success]


# [start failure]
def greet_all_but_grace(ctx: PartitionContext) -> None:
    if ctx.context["person"] == "Grace":
        raise ValueError("nobody knows Grace")


def test_one_unknown_person_fails_the_run(tmp_path: Path) -> None:
    with local_worker(tmp_path, steps={"greet": greet_all_but_grace}) as jobs:
        run = dag.test()
        assert run.state == "failed"
        assert list(jobs.errors()) == ["Grace"]
        assert "nobody knows Grace" in jobs.errors()["Grace"]


# [end failure]


# [start step]
def test_a_person_is_greeted_by_name(tmp_path: Path) -> None:
    with local_job_repository(tmp_path) as jobs:
        jobs.submit("greet", {"ada": {"person": "Ada"}})
        run_pending(jobs, imports=["greetings"])
        assert jobs.results() == {"ada": {"greeting": "Hello, Ada!"}}, jobs.report()


# [end step]
