"""LiveNodesSensor: waits until enough workers are there, before a job is cut to their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue

from airflow_dbpartition import templated
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP
from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.hooks import DEFAULT_CONN_ID, opened
from airflow_dbpartition.repository_task import RepositoryTask
from airflow_dbpartition.task_outcome import airflow_errors

if TYPE_CHECKING:
    from airflow.sdk import Context

_READERS: dict[str, templated.Reader] = {
    "min_nodes": templated.integer(1),
    "node_group": templated.text(100),
    "step": templated.optional(templated.text(200)),
    "repository_conn_id": templated.conn_id,
}


class LiveNodesSensor(RepositoryTask, BaseSensorOperator):
    """Succeeds when so many nodes are live; its return value is their number. `poke` and `reschedule` modes.

    Args:
        min_nodes: how many.
        node_group: of which group.
        step: only nodes that have registered it; None = any.
        repository_conn_id: the Airflow connection of the job repository.
        poke_interval: seconds between two looks.
        kwargs: everything else a sensor takes (timeout, mode, soft_fail …).
    """

    template_fields: Sequence[str] = (*_READERS,)
    ui_color = "#e6f1f2"
    _readers = _READERS

    def __init__(
        self,
        *,
        min_nodes: int | str = 1,
        node_group: str = DEFAULT_NODE_GROUP,
        step: str | None = None,
        repository_conn_id: str = DEFAULT_CONN_ID,
        poke_interval: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.min_nodes = min_nodes
        self.node_group = node_group
        self.step = step
        self.repository_conn_id = repository_conn_id
        self._refuse_what_is_known()

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """One look. An outage of the database is waited out, within the sensor's timeout."""
        wanted, group, step = (self._value(name) for name in ("min_nodes", "node_group", "step"))
        with airflow_errors():
            address = self._hook().address()
            within_s = address.timings.unreachable_after_s
            try:
                with opened(address) as repository:
                    live = repository.nodes.live(node_group=group, within_s=within_s, step=step)
            except DatabaseError as error:
                self.log.warning("%s; the wait goes on", error)
                return PokeReturnValue(is_done=False)
        knowing = "" if step is None else f" that know the step {step!r}"
        self.log.info("%d of %d live nodes of group %r%s", len(live), wanted, group, knowing)
        return PokeReturnValue(is_done=len(live) >= wanted, xcom_value=len(live))
