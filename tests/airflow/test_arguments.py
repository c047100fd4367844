"""Operator and sensor as a DAG's author writes them: wrong arguments, templates, other tasks' outputs, mapping."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator, task

from airflow_dbpartition.assignment import FixedNodeCount
from airflow_dbpartition.domain import Partition
from airflow_dbpartition.errors import ConfigurationError
from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners import (
    ColumnRangePartitioner,
    FilesPartitioner,
    ListPartitioner,
    QueryPartitioner,
)
from airflow_dbpartition.sensors import PartitionCompletionSensor


@pytest.fixture(autouse=True)
def dag() -> Iterator[DAG]:
    """Every test's tasks are in a DAG of their own."""
    with DAG("arguments", render_template_as_native_obj=True) as dag:
        yield dag


def operator(**options: Any) -> PartitionedStepOperator:
    return PartitionedStepOperator(**{"task_id": "cut", "step": "work", "partitioner": {"a": {}}, **options})


def sensor(**options: Any) -> PartitionCompletionSensor:
    return PartitionCompletionSensor(**{"task_id": "wait", "job_execution_id": 1, **options})


def rendered(written: Any, **values: Any) -> Any:
    """The operator as it stands when the task runs."""
    written.render_template_fields({"params": values, **values})
    return written


@task
def made_upstream() -> Any:
    return None


# --- wrong arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("step", "", "expected step to be text of 1 to 200 characters, got ''"),
        ("step", 5, "got 5"),
        ("partitioner", 5, "expected partitioner to be an object with partition(grid_size), a function, or a mapping"),
        ("partitioner", "flights", "got str"),
        ("partitioner", ListPartitioner, "got the class: write ListPartitioner(...)"),
        ("partitions_per_node", 0, "expected partitions_per_node to be an integer of at least 1, got 0"),
        ("min_nodes", "many", "expected min_nodes to be an integer of at least 1, got 'many'"),
        ("no_nodes", "explode", 'expected no_nodes to be "wait" or "fail", got \'explode\''),
        ("node_group", " ", "expected node_group to be text of 1 to 100 characters, got ' '"),
        ("transferable", "sometimes", "expected transferable to be True, False or \"until_started\", got 'sometimes'"),
        ("assignment", "fair", 'expected assignment to be "round_robin"'),
        ("stealing", "perhaps", "expected stealing to be True or False, got 'perhaps'"),
        ("partition_retries", -1, "expected partition_retries to be an integer of at least 0, got -1"),
        ("partition_retry_delay", "soon", "expected partition_retry_delay to be a timedelta or a number of seconds"),
        ("partition_retry_max_delay", -1, "expected partition_retry_max_delay to be"),
        ("max_node_losses", 0, "expected max_node_losses to be an integer of at least 1, got 0"),
        ("partition_timeout", 0, "expected partition_timeout to be a timedelta or a positive number of seconds"),
        ("fail_fast", 2, "expected fail_fast to be True or False, got 2"),
        ("priority", "high", "expected priority to be an integer"),
        ("job_name", "x" * 251, "expected job_name to be text of 1 to 250 characters"),
        ("job_parameters", ["a"], "expected job_parameters to be a mapping, got list ['a']"),
        ("on_clear", "ask", 'expected on_clear to be "restart" or "rerun", got \'ask\''),
        ("repository_conn_id", "", "expected repository_conn_id to be text"),
        ("repository_conn_id", None, "got None"),
        ("context_limit_bytes", 0, "expected context_limit_bytes to be an integer of at least 1, got 0"),
        ("timeout", timedelta(0), "expected timeout to be a timedelta or a positive number of seconds"),
        ("wait_for_completion", "later", "expected wait_for_completion to be True or False, got 'later'"),
        ("deferrable", "no", "expected deferrable to be True or False, got 'no'"),
        ("poll_interval", 0, "expected poll_interval to be a timedelta or a positive number of seconds, got 0"),
        ("no_nodes_timeout", -5, "expected no_nodes_timeout to be a timedelta or a positive number of seconds"),
        ("on_sigterm", "ignore", 'expected on_sigterm to be "detach" or "stop", got \'ignore\''),
    ],
)
def test_a_wrong_argument_of_the_operator_is_one_line_when_the_dag_is_read(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        operator(**{name: value})
    message = str(caught.value)
    assert message.startswith("task 'cut': ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("job_execution_id", 0, "expected job_execution_id to be an integer of at least 1, got 0"),
        ("job_execution_id", "latest", "got 'latest'"),
        ("restart_failed", "once", "expected restart_failed to be True or False, got 'once'"),
        ("repository_conn_id", "", "expected repository_conn_id to be text"),
        ("no_nodes_timeout", "never", "expected no_nodes_timeout to be"),
        ("deferrable", "yes", "expected deferrable to be True or False, got 'yes'"),
        ("on_sigterm", "kill", "expected on_sigterm to be"),
    ],
)
def test_a_wrong_argument_of_the_sensor_is_one_line_when_the_dag_is_read(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sensor(**{name: value})
    message = str(caught.value)
    assert message.startswith("task 'wait': ")
    assert words in message
    assert "\n" not in message


def test_a_misspelt_or_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="partition_per_node"):
        operator(partition_per_node=2)
    with pytest.raises(TypeError, match="step"):
        PartitionedStepOperator(task_id="cut", partitioner={})  # type: ignore[call-arg]


def test_a_template_that_renders_to_nonsense_is_named_when_the_task_runs() -> None:
    cut = rendered(operator(partitions_per_node="{{ params.n }}"), n="many")
    with pytest.raises(ConfigurationError, match=r"task 'cut': expected partitions_per_node .* got 'many'"):
        cut._value("partitions_per_node")


def test_everything_may_be_given_as_text() -> None:
    cut = operator(
        partitions_per_node="4",
        transferable="True",
        stealing="false",
        timeout="3600",
        no_nodes_timeout="None",
        wait_for_completion="true",
        deferrable=False,
    )
    assert cut._value("partitions_per_node") == 4
    assert cut._value("stealing") is False
    assert cut._value("timeout") == 3600.0
    assert cut._value("no_nodes_timeout") is None
    assert cut._value("wait_for_completion") is True


def test_airflows_configuration_decides_where_the_author_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not operator().deferrable
    monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", "True")
    assert operator(task_id="second").deferrable
    assert sensor().deferrable
    assert not operator(task_id="third", deferrable=False).deferrable


# --- templates -----------------------------------------------------------------------------------------------------


def test_every_argument_but_deferrable_may_be_a_template() -> None:
    names = set(PartitionedStepOperator.template_fields) - {"partitioner"}
    cut = operator(**dict.fromkeys(names, "{{ params.anything }}"))
    assert all(getattr(cut, name) == "{{ params.anything }}" for name in names)
    names = set(PartitionCompletionSensor.template_fields)
    wait = sensor(**dict.fromkeys(names, "{{ params.anything }}"))
    assert all(getattr(wait, name) == "{{ params.anything }}" for name in names)


@pytest.mark.parametrize(
    ("partitioner", "fields"),
    [
        (
            ColumnRangePartitioner(conn_id="{{ params.a }}", table="t_{{ params.a }}", column="{{ params.a }}"),
            {"conn_id": "x", "table": "t_x", "column": "x"},
        ),
        (
            QueryPartitioner(sql="select '{{ params.a }}' as key", parameters={"day": "{{ params.a }}"}),
            {"sql": "select 'x' as key", "parameters": {"day": "x"}},
        ),
        (FilesPartitioner("/data/{{ params.a }}/*.csv"), {"path": "/data/x/*.csv"}),
        (ListPartitioner(["{{ params.a }}", "y"]), {"values": ["x", "y"]}),
    ],
)
def test_the_fields_of_a_partitioner_are_rendered_in_a_copy(partitioner: Any, fields: dict[str, Any]) -> None:
    cut = rendered(operator(partitioner=partitioner), a="x")
    assert {name: getattr(cut.partitioner, name) for name in fields} == fields
    assert "{{" in repr(partitioner)  # what all runs of this process share is as it was written


def test_a_mapping_of_contexts_and_an_assignment_are_rendered() -> None:
    cut = rendered(
        operator(partitioner={"a": {"day": "{{ params.a }}"}}, assignment=FixedNodeCount("{{ params.n }}")),
        a="x",
        n=2,
    )
    assert cut.partitioner.contexts == {"a": {"day": "x"}}
    assert cut.assignment.count() == 2


def test_a_function_is_called_by_nobody_but_the_launch() -> None:
    called: list[int] = []

    def cut_up(grid_size: int) -> list[Partition]:
        called.append(grid_size)
        return []

    cut = rendered(operator(partitioner=cut_up))
    assert called == []
    assert list(cut.partitioner.partition(3)) == []
    assert called == [3]


# --- other tasks' outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "partitioner",
    [
        lambda output: output,
        lambda output: {"a": {"rows": output}},
        lambda output: [{"rows": output}],
        lambda output: ListPartitioner(output),
        lambda output: ListPartitioner([output, 2]),
        lambda output: QueryPartitioner(sql="select 1 as key", parameters={"day": output}),
        lambda output: ColumnRangePartitioner(table=output, column="id"),
    ],
)
def test_another_tasks_output_anywhere_in_the_partitioner_makes_it_upstream(partitioner: Any) -> None:
    cut = operator(partitioner=partitioner(made_upstream()))
    assert cut.upstream_task_ids == {"made_upstream"}


def test_another_tasks_output_in_any_other_argument_makes_it_upstream() -> None:
    assert operator(job_parameters={"day": made_upstream()}).upstream_task_ids == {"made_upstream"}
    cut = operator(task_id="second")
    assert sensor(job_execution_id=cut.output).upstream_task_ids == {"second"}


# --- mapping -------------------------------------------------------------------------------------------------------


def test_operator_and_sensor_can_be_mapped(dag: DAG) -> None:
    cut = PartitionedStepOperator.partial(task_id="cut", step="work", wait_for_completion=True).expand(
        partitioner=made_upstream()
    )
    wait = PartitionCompletionSensor.partial(task_id="wait").expand(job_execution_id=cut.output)
    by_keywords = PartitionedStepOperator.partial(task_id="more", partitioner={"a": {}}).expand_kwargs(
        [{"step": "one"}, {"step": "two"}]
    )
    assert cut.upstream_task_ids == {"made_upstream"}
    assert wait.upstream_task_ids == {"cut"}
    assert {task_id for task_id in dag.task_ids if task_id != "made_upstream"} == {"cut", "wait", "more"}
    assert isinstance(by_keywords.unmap({"step": "one"}), BaseOperator)


def test_a_dag_may_hold_the_same_partitioner_in_two_tasks() -> None:
    shared = ListPartitioner(["{{ params.a }}"])
    first, second = operator(partitioner=shared), operator(task_id="second", partitioner=shared)
    rendered(first, a="x")
    rendered(second, a="y")
    assert (first.partitioner.values, second.partitioner.values) == (["x"], ["y"])
