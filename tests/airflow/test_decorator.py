"""`@task.partitioned_step`: a function says what the partitions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_dbpartition.decorators import DecoratedPartitionedStepOperator, partitioned_step_task
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.repository import JobRepository
from tests.airflow.test_arguments import rendered
from tests.airflow.worlds import Try
from tests.scenarios import add_node


def partitioned_step(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """The decorator, typed: Airflow types what it makes of a function too loosely."""
    decorate: Any = partitioned_step_task(**options)
    return decorate  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def dag() -> Any:
    with DAG("dag", schedule=None) as dag:
        yield dag


def contexts(made: Any, repository: JobRepository, **context: Any) -> dict[str, Any]:
    """Run the task of a decorated call, and return the contexts of the partitions that it wrote."""
    operator = made.operator
    this = Try(task_id=operator.task_id)
    full = {**this.context(), **context}
    operator.render_template_fields(full)
    job_execution_id = operator.execute(full)
    return {row.partition_key: row.context for row in repository.reading.partitions(job_execution_id)}


def test_airflow_finds_the_decorator_by_its_name() -> None:
    @task.partitioned_step(step="work")
    def cut() -> Any:
        return {"a": {}}

    made: Any = cut()
    made = made.operator
    assert isinstance(made, DecoratedPartitionedStepOperator)
    assert (made.task_id, made.custom_operator_name) == ("cut", "@task.partitioned_step")


def test_the_function_is_called_with_the_calls_arguments_and_the_grid_size(connected: JobRepository) -> None:
    add_node(connected, "a")
    add_node(connected, "b")

    @partitioned_step(step="work", repository_conn_id="repo", partitions_per_node=3)
    def cut(day: str, grid_size: int, suffix: str = "!") -> Any:
        return {f"p{number}": {"day": day + suffix} for number in range(grid_size)}

    found = contexts(cut("{{ params.day }}", suffix="?"), connected, params={"day": "Monday"})
    assert found == {f"p{number}": {"day": "Monday?"} for number in range(6)}


def test_a_function_of_airflows_context_gets_it(connected: JobRepository) -> None:
    add_node(connected)

    @partitioned_step(step="work", repository_conn_id="repo")
    def cut(run_id: Any = None) -> Any:
        return [{"run": run_id}]

    assert list(contexts(cut(), connected).values()) == [{"run": "run"}]


def test_every_argument_of_the_operator_may_be_given_and_a_wrong_one_is_named() -> None:
    @partitioned_step(step="work", partition_retries=2, wait_for_completion=True, task_id="named")
    def cut() -> Any:
        return {}

    made = cut().operator
    assert (made.task_id, made.partition_retries, made.wait_for_completion) == ("named", 2, True)

    with pytest.raises(ConfigurationError, match=r"expected partition_retries to be an integer of at least 0, got -1"):
        partitioned_step(step="work", partition_retries=-1)(contexts)("made", "repository")


def test_it_can_be_mapped(connected: JobRepository) -> None:
    add_node(connected)

    @partitioned_step(step="work", repository_conn_id="repo")
    def cut(day: str, grid_size: int) -> Any:
        return {f"{day}-{number}": {} for number in range(grid_size)}

    cut.expand(day=["Monday", "Tuesday"])
    made = rendered(cut.override(task_id="one")(day="Monday").operator)
    assert made.step == "work"
