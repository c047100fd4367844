"""LiveNodesSensor: waits until enough workers are there, before a job is cut to their number."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator, BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferralTimeout,
)

from airflow_dbpartition import templated
from airflow_dbpartition.domain import DEFAULT_NODE_GROUP
from airflow_dbpartition.errors import DatabaseError
from airflow_dbpartition.hooks import DEFAULT_CONN_ID, opened
from airflow_dbpartition.repository_task import SHORTEST_PAUSE_S, RepositoryTask
from airflow_dbpartition.task_outcome import airflow_errors

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_dbpartition.connections import RepositoryAddress
    from airflow_dbpartition.storable import JsonObject
    from airflow_dbpartition.waiting import NodesWanted

_READERS: dict[str, templated.Reader] = {
    "min_nodes": templated.integer(1),
    "node_group": templated.text(100),
    "step": templated.optional(templated.text(200)),
    "repository_conn_id": templated.conn_id,
}


class LiveNodesSensor(RepositoryTask, BaseSensorOperator):
    """Succeeds when so many nodes are live; its return value is their number.

    `mode="poke"`, `mode="reschedule"` and `deferrable=True` look at the same. `soft_fail` skips on timeouts, never over
    a wrong argument or connection.

    Args:
        min_nodes: how many.
        node_group: of which group.
        step: only nodes that have registered it; None = any.
        repository_conn_id: the Airflow connection of the job repository.
        deferrable: wait in the triggerer; by default as Airflow's `[operators] default_deferrable` says.
        poke_interval: seconds between two looks, in every mode.
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
        deferrable: bool | None = None,
        poke_interval: timedelta | float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.min_nodes = min_nodes
        self.node_group = node_group
        self.step = step
        self.repository_conn_id = repository_conn_id
        self.deferrable = self._is_deferrable(deferrable)
        self._refuse_what_is_known()

    # --- Airflow's entry points --------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        """Wait; returns the number of live nodes."""
        if self.deferrable:
            return self._look_or_defer(datetime.now(timezone.utc) + self._patience)
        try:
            return super().execute(context)
        except AirflowSkipException as skipped:  # by Airflow's sensors, over whatever another try would not mend
            if self.soft_fail and isinstance(skipped.__cause__, AirflowFailException):
                raise skipped.__cause__ from None
            raise

    def execute_live(
        self,
        context: Context,  # noqa: ARG002 - Airflow's signature
        event: JsonObject | None = None,
        *,
        give_up_at: str = "",
    ) -> Any:
        """Resumed: the nodes are counted again, and where some have left meanwhile the wait goes on."""
        if event is not None:
            self.log.info("resumed: %s", event.get("message"))
        # dag.test() hands over the event, and none of what the task deferred with.
        until = datetime.fromisoformat(give_up_at) if give_up_at else datetime.now(timezone.utc) + self._patience
        return self._look_or_defer(until)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """The sensors' own version, which turns every failure into a skip when `soft_fail` is set, is passed over."""
        try:
            return BaseOperator.resume_execution(self, next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            return self._look_or_defer(datetime.now(timezone.utc))

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - Airflow's signature
        """One look. An outage of the database is waited out, within the sensor's timeout."""
        with airflow_errors():
            return self._look(self._hook().address())

    # --- looking -----------------------------------------------------------------------------------------------

    def _look(self, address: RepositoryAddress) -> PokeReturnValue:
        wanted = self._wanted()
        try:
            with opened(address) as repository:
                nodes = repository.nodes.all(node_group=wanted.node_group)
        except DatabaseError as error:
            self.log.warning("%s; the wait goes on", error)
            return PokeReturnValue(is_done=False)
        live = wanted.among(nodes, within_s=address.timings.unreachable_after_s)
        self.log.info(wanted.describe(live))
        return PokeReturnValue(is_done=live >= wanted.count, xcom_value=live)

    def _wanted(self) -> NodesWanted:
        from airflow_dbpartition.waiting import NodesWanted

        return NodesWanted(self._value("min_nodes"), self._value("node_group"), self._value("step"))

    # --- in the triggerer --------------------------------------------------------------------------------------

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def _look_or_defer(self, give_up_at: datetime) -> Any:
        try:
            with airflow_errors():
                address = self._hook().address()
                looked = self._look(address)
            if looked.is_done:
                return looked.xcom_value
            left = give_up_at - datetime.now(timezone.utc)
            if left > timedelta():
                self._defer(address, give_up_at, left)
            raise AirflowSensorTimeout(f"timed out after {self.timeout:g} s: there are not enough live nodes")
        except AirflowException as error:
            if self.never_fail or (self.soft_fail and isinstance(error, AirflowSensorTimeout)):
                raise AirflowSkipException(f"skipped: {error}") from error
            raise

    def _defer(self, address: RepositoryAddress, give_up_at: datetime, left: timedelta) -> NoReturn:
        from airflow_dbpartition.triggers import LiveNodesTrigger

        wanted = self._wanted()
        self.defer(
            trigger=LiveNodesTrigger(
                min_nodes=wanted.count,
                node_group=wanted.node_group,
                repository_conn_id=self._value("repository_conn_id"),
                step=wanted.step,
                poll_interval_s=min(max(SHORTEST_PAUSE_S, self.poke_interval), address.longest_poll_interval_s),
            ),
            method_name="execute_live",
            kwargs={"give_up_at": give_up_at.isoformat()},
            timeout=left,
        )
