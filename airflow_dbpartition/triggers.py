"""Deferred waits: for the end of a job execution, for the launch of a job, for live nodes.

Everything that a kill needs is imported here, at the top: an import inside `on_kill` would hold up the event loop for
the very second that Airflow allows it. So this module is imported by tasks only when they defer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_dbpartition import migrations as _migrations  # noqa: F401 - for open_repository, see above
from airflow_dbpartition.config import Timings
from airflow_dbpartition.connections import RepositoryAddress
from airflow_dbpartition.errors import DbPartitionError
from airflow_dbpartition.hooks import JobRepositoryHook, open_repository
from airflow_dbpartition.polling import shared_poller
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.waiting import NodesWanted

DEFERRED = "deferred"

_kills: set[asyncio.Task[None]] = set()


class PartitionCompletionTrigger(BaseTrigger):
    """Waits for a job execution, or its latest restart, and fires once; what the task says is decided by the task.

    Only ids travel, and running it again, here or in another triggerer, does no harm. All waits of a triggerer share
    one connection and one query a tick; on PostgreSQL it also tells them of an end at once. An outage of the database
    is waited out.

    Args:
        job_execution_id: the execution.
        repository_conn_id: the Airflow connection of the job repository.
        owner_token: of the try that defers; fences the stop when a person kills the task. None = never stop.
        poll_interval_s: seconds between two looks, and before the first.
        no_nodes_timeout_s: seconds without a live node, with work pending, after which it fires; None = never.
    """

    def __init__(
        self,
        job_execution_id: int,
        repository_conn_id: str,
        owner_token: str | None = None,
        poll_interval_s: float = 5.0,
        no_nodes_timeout_s: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.job_execution_id = job_execution_id
        self.repository_conn_id = repository_conn_id
        self.owner_token = owner_token
        self.poll_interval_s = poll_interval_s
        self.no_nodes_timeout_s = no_nodes_timeout_s
        self._current_id = job_execution_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and the arguments; no secret is among them."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "job_execution_id": self.job_execution_id,
                "repository_conn_id": self.repository_conn_id,
                "owner_token": self.owner_token,
                "poll_interval_s": self.poll_interval_s,
                "no_nodes_timeout_s": self.no_nodes_timeout_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when the execution has ended, is late, or has nobody to do it.

        The first look is an interval away: the task has just looked itself; and Airflow fails a deferred task that
        comes back before its scheduler has heard of its going.
        """
        await asyncio.sleep(self.poll_interval_s)
        poller = shared_poller(self.repository_conn_id, partial(_connect, self.repository_conn_id))
        async for update in poller.watch(
            self.job_execution_id,
            poll_interval_s=self.poll_interval_s,
            no_nodes_timeout_s=self.no_nodes_timeout_s,
        ):
            self._current_id = update.job_execution_id
            self.log.info(update.message)
            if update.outcome is not None:
                yield TriggerEvent(  # type: ignore[no-untyped-call]
                    {
                        "status": update.outcome.value,
                        "job_execution_id": update.job_execution_id,
                        "message": update.message,
                    }
                )
                return

    async def on_kill(self) -> None:
        """A person has marked or cleared the deferred task: stop the execution, if this try still owns it.

        Airflow 3.3 also calls this on a healthy task that another triggerer took over, and cancels it after about a
        second; hence the look at the task's state, the fence, and a task of its own that is not cancelled.
        """
        kill = asyncio.ensure_future(self._stop_if_killed())
        _kills.add(kill)
        kill.add_done_callback(_kills.discard)
        await asyncio.shield(kill)

    async def _stop_if_killed(self) -> None:
        if self.owner_token is None or self.task_instance is None:
            return
        state = await self._task_state(self.task_instance)
        if state == DEFERRED:
            self.log.info("job execution %s goes on: the task is still deferred", self._current_id)
            return
        thread = ThreadPoolExecutor(1, thread_name_prefix="dbpartition-kill")
        try:
            address = await JobRepositoryHook(self.repository_conn_id).async_address()
            reason = f"the task was killed in Airflow while deferred (its state: {state or 'cleared'})"
            stop = partial(_stop, address, self._current_id, owner_token=self.owner_token, reason=reason)
            self.log.info(await asyncio.get_running_loop().run_in_executor(thread, stop))
        except DbPartitionError as error:
            self.log.warning("job execution %s could not be stopped: %s", self._current_id, error)
        finally:
            thread.shutdown(wait=False)

    async def _task_state(self, ti: Any) -> str | None:
        """What Airflow says of the task; None = cleared."""
        states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
        )
        return next(iter(states.get(ti.run_id, {}).values()), None)


class JobLaunchTrigger(BaseTrigger):
    """Waits until somebody has launched a job, and fires once. An outage of the database is waited out.

    Args:
        job_name, job_key: of the job.
        repository_conn_id: the Airflow connection of the job repository.
        poll_interval_s: seconds between two looks, and before the first.
    """

    def __init__(self, job_name: str, job_key: str, repository_conn_id: str, poll_interval_s: float = 5.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.job_name = job_name
        self.job_key = job_key
        self.repository_conn_id = repository_conn_id
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and the arguments."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "job_name": self.job_name,
                "job_key": self.job_key,
                "repository_conn_id": self.repository_conn_id,
                "poll_interval_s": self.poll_interval_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once; each look has a connection of its own, so that what waits for long holds none."""
        while True:
            await asyncio.sleep(self.poll_interval_s)
            try:
                address = await JobRepositoryHook(self.repository_conn_id).async_address()
                found = await asyncio.to_thread(_latest, address, self.job_name, self.job_key)
            except DbPartitionError as error:
                self.log.warning("%s; the wait goes on", error)
                continue
            if found is not None:
                message = f"job {self.job_name!r} was launched as job execution {found}"
                yield TriggerEvent({"message": message, "job_execution_id": found})  # type: ignore[no-untyped-call]
                return


class LiveNodesTrigger(BaseTrigger):
    """Waits until so many nodes are live, and fires once; the task counts them again.

    It shares the connection of all waits of a triggerer, and one query a tick with all waits for nodes. An outage of
    the database is waited out.

    Args:
        min_nodes: how many.
        node_group: of which group.
        repository_conn_id: the Airflow connection of the job repository.
        step: only nodes that have registered it; None = any.
        poll_interval_s: seconds between two looks, and before the first.
    """

    def __init__(
        self,
        min_nodes: int,
        node_group: str,
        repository_conn_id: str,
        step: str | None = None,
        poll_interval_s: float = 5.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.min_nodes = min_nodes
        self.node_group = node_group
        self.repository_conn_id = repository_conn_id
        self.step = step
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and the arguments."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "min_nodes": self.min_nodes,
                "node_group": self.node_group,
                "repository_conn_id": self.repository_conn_id,
                "step": self.step,
                "poll_interval_s": self.poll_interval_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire once, when there are enough; for the first look see `PartitionCompletionTrigger.run`."""
        await asyncio.sleep(self.poll_interval_s)
        poller = shared_poller(self.repository_conn_id, partial(_connect, self.repository_conn_id))
        wanted = NodesWanted(self.min_nodes, self.node_group, self.step)
        async for update in poller.watch_nodes(wanted, poll_interval_s=self.poll_interval_s):
            self.log.info(update.message)
            if update.is_last:
                yield TriggerEvent({"message": update.message})  # type: ignore[no-untyped-call]
                return


def _latest(address: RepositoryAddress, job_name: str, job_key: str) -> int | None:
    repository = open_repository(address)
    try:
        latest = repository.reading.latest(job_name, job_key)
        return None if latest is None else latest.job_execution_id
    finally:
        repository.close()


async def _connect(repository_conn_id: str) -> tuple[Callable[[], JobRepository], Timings]:
    address = await JobRepositoryHook(repository_conn_id).async_address()
    return partial(open_repository, address, pool_size=1), address.timings


def _stop(address: RepositoryAddress, job_execution_id: int, *, owner_token: str, reason: str) -> str:
    """Stop an execution on a connection of its own; what happened, in words."""
    repository = open_repository(address)
    try:
        latest = repository.reading.latest_of_instance(job_execution_id).job_execution_id
        status = repository.executions.stop(latest, owner_token=owner_token, reason=reason)
        return f"job execution {latest} is {status}: {reason}"
    finally:
        repository.close()
