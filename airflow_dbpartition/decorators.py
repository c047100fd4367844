"""`@task.partitioned_step`: the decorated function is the partitioner."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.decorator import DecoratedOperator, task_decorator_factory
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from airflow_dbpartition.operators import PartitionedStepOperator
from airflow_dbpartition.partitioners.function import FunctionPartitioner

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator

GRID_SIZE = "grid_size"


class DecoratedPartitionedStepOperator(DecoratedOperator, PartitionedStepOperator):
    """PartitionedStepOperator whose partitioner is the decorated function, called with the task's arguments.

    A parameter `grid_size` that the call leaves out gets the grid size, and names of Airflow's context their values.
    """

    custom_operator_name = "@task.partitioned_step"
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in PartitionedStepOperator.template_fields if name != "partitioner"),
    )
    template_fields_renderers = {  # noqa: RUF012 - Airflow's own declaration
        **DecoratedOperator.template_fields_renderers,
        **PartitionedStepOperator.template_fields_renderers,
    }

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("multiple_outputs", None)
        given = dict(op_kwargs or {})
        signature = inspect.signature(python_callable)
        if GRID_SIZE in signature.parameters and GRID_SIZE not in signature.bind_partial(*(op_args or ())).arguments:
            given.setdefault(GRID_SIZE, None)  # Airflow checks the call when the DAG is read
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=given,
            partitioner=FunctionPartitioner(python_callable),
            **kwargs,
        )

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        super().render_template_fields(context, jinja_env)
        function, op_args, given = self.python_callable, self.op_args, dict(self.op_kwargs)
        for name in inspect.signature(function).parameters:
            if name in KNOWN_CONTEXT_KEYS and name in context and given.get(name) is None:
                given[name] = context[name]  # type: ignore[literal-required]

        @functools.wraps(function)
        def call(grid_size: int) -> Any:
            if GRID_SIZE in given and given[GRID_SIZE] is None:
                return function(*op_args, **{**given, GRID_SIZE: grid_size})
            return function(*op_args, **given)

        del call.__wrapped__  # the partitioner is to see this signature
        self.partitioner = FunctionPartitioner(call)


def partitioned_step_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Make a task of a function that says what the partitions are.

    Args:
        python_callable: returns what every partitioner returns: a mapping of key to context, a list of contexts, or
            `Partition`s. It runs in Airflow, once, when the job is planned.
        kwargs: what PartitionedStepOperator takes, `step` above all; `partitioner` excepted.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=False,
        decorated_operator_class=DecoratedPartitionedStepOperator,
        **kwargs,
    )
