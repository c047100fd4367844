"""A small client of Airflow's public API: trigger, look, clear, mark, and wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from airflow_dbpartition.demo.processes import DemoError

JsonObject = dict[str, Any]
FINAL_RUN_STATES = frozenset({"success", "failed"})
# What every line of a task's log repeats, beside what is printed first.
LOG_NOISE = frozenset(
    {"timestamp", "level", "event", "logger", "filename", "lineno"}
    | {"dag_id", "run_id", "task_id", "map_index", "try_number", "ti_id", "ti"}
)


class AirflowApiError(DemoError):
    """Airflow's API answered with an error.

    Attributes:
        status: the HTTP status, or None when there was no answer.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AirflowWaitError(DemoError):
    """What was waited for did not come in time."""


class AirflowApi:
    """Talks to one Airflow whose simple auth manager lets everybody be an administrator.

    Args:
        base_url: such as `http://127.0.0.1:8080`.
        poll_interval_s: seconds between two looks while waiting.
        timeout_s: seconds for one request.
    """

    def __init__(self, base_url: str, *, poll_interval_s: float = 0.5, timeout_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._poll_interval_s = poll_interval_s
        self._client = httpx.Client(base_url=self.base_url, timeout=timeout_s, trust_env=False)
        self._token: str | None = None

    def token(self) -> str:
        """Return a bearer token, asking for one at the first call."""
        if self._token is None:
            self._token = str(self._send("GET", "/auth/token", headers={}).json()["access_token"])
        return self._token

    def health(self) -> JsonObject:
        """Return what Airflow says of its own components."""
        return self._json("GET", "/monitor/health")

    def import_errors(self) -> list[JsonObject]:
        """Return the DAG files that did not import, with their stack traces."""
        return list(self._json("GET", "/importErrors")["import_errors"])

    def wait_for_dag(self, dag_id: str, *, timeout_s: float = 60.0) -> JsonObject:
        """Return the DAG once its file has been read.

        Raises:
            AirflowWaitError: it did not appear; the text has the import errors that there are.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._json("GET", f"/dags/{quote(dag_id)}")
            except AirflowApiError as error:
                if error.status != 404:
                    raise
            if time.monotonic() > deadline:
                errors = self.import_errors()
                broken = "".join(f"\n{error['filename']}:\n{error['stack_trace']}" for error in errors)
                why = (
                    f"files that do not import:{broken}" if broken else "no file failed to import: is it in the folder?"
                )
                raise AirflowWaitError(f"DAG {dag_id!r} did not appear within {timeout_s:g} s; {why}")
            time.sleep(self._poll_interval_s)

    def pause(self, dag_id: str) -> None:
        """Let the scheduler begin nothing more of the DAG."""
        self._json("PATCH", f"/dags/{quote(dag_id)}", body={"is_paused": True})

    def unpause(self, dag_id: str) -> None:
        """Let the scheduler run the DAG."""
        self._json("PATCH", f"/dags/{quote(dag_id)}", body={"is_paused": False})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, *, run_id: str | None = None) -> str:
        """Start a run and return its id."""
        body: JsonObject = {"logical_date": None, "conf": dict(conf or {})}  # the date must be there, if only as null
        if run_id is not None:
            body["dag_run_id"] = run_id
        return str(self._json("POST", f"/dags/{quote(dag_id)}/dagRuns", body=body)["dag_run_id"])

    def dag_run(self, dag_id: str, run_id: str) -> JsonObject:
        """Return one run; its `state` is queued, running, success or failed."""
        return self._json("GET", self._run_path(dag_id, run_id))

    def task_instances(self, dag_id: str, run_id: str) -> list[JsonObject]:
        """Return the task instances of one run (at most 1,000)."""
        path = f"{self._run_path(dag_id, run_id)}/taskInstances"
        return list(self._json("GET", path, params={"limit": 1000})["task_instances"])

    def task_instance(self, dag_id: str, run_id: str, task_id: str) -> JsonObject:
        """Return one task instance that is not mapped."""
        return self._json("GET", self._task_path(dag_id, run_id, task_id))

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Return the state of each task by its id; None is not scheduled yet."""
        return {task["task_id"]: task["state"] for task in self.task_instances(dag_id, run_id)}

    def task_log(self, dag_id: str, run_id: str, task_id: str, *, try_number: int = 1, map_index: int = -1) -> str:
        """Return the log of one try as text, one event a line."""
        answer = self._json(
            "GET",
            f"{self._task_path(dag_id, run_id, task_id)}/logs/{try_number}",
            params={"full_content": True, "map_index": map_index},
        )
        return "\n".join(_log_line(event) for event in answer["content"])

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Iterable[str],
        *,
        only_failed: bool = False,
        include_downstream: bool = False,
    ) -> list[JsonObject]:
        """Clear task instances as a person would, and return those that were cleared."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "only_failed": only_failed,
            "include_downstream": include_downstream,
            "reset_dag_runs": True,
        }
        return list(self._json("POST", f"/dags/{quote(dag_id)}/clearTaskInstances", body=body)["task_instances"])

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Mark a task instance `success`, `failed` or `skipped`, as a person would."""
        self._json("PATCH", self._task_path(dag_id, run_id, task_id), body={"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run `success`, `failed` or `queued`, as a person would."""
        self._json("PATCH", self._run_path(dag_id, run_id), body={"state": state})

    def links(self, dag_id: str, run_id: str, task_id: str) -> dict[str, str | None]:
        """Return the extra links of a task instance, by the names of their buttons."""
        return dict(self._json("GET", f"{self._task_path(dag_id, run_id, task_id)}/links")["extra_links"])

    def xcom(self, dag_id: str, run_id: str, task_id: str, *, key: str = "return_value", map_index: int = -1) -> Any:
        """Return what a task pushed.

        Raises:
            AirflowApiError: with status 404, it pushed nothing.
        """
        path = f"{self._task_path(dag_id, run_id, task_id)}/xcomEntries/{quote(key)}"
        return self._json("GET", path, params={"map_index": map_index, "deserialize": False, "stringify": False})[
            "value"
        ]

    def wait_for_run(
        self,
        dag_id: str,
        run_id: str,
        *,
        timeout_s: float,
        states: Collection[str] = FINAL_RUN_STATES,
        on_poll: Callable[[JsonObject], None] | None = None,
    ) -> JsonObject:
        """Return the run once it is in one of these states.

        `on_poll` is called with the run at every look, the last one included; what it raises ends the wait.

        Raises:
            AirflowWaitError: it took longer; the text has the states of its tasks.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            run = self.dag_run(dag_id, run_id)
            if on_poll is not None:
                on_poll(run)
            if run["state"] in states:
                return run
            if time.monotonic() > deadline:
                raise AirflowWaitError(
                    f"run {run_id!r} of DAG {dag_id!r} was {run['state']} after {timeout_s:g} s, expected one of"
                    f" {', '.join(sorted(states))}; its tasks: {self.task_states(dag_id, run_id)}"
                )
            time.sleep(self._poll_interval_s)

    def wait_for_task(
        self, dag_id: str, run_id: str, task_id: str, *, states: Collection[str], timeout_s: float
    ) -> JsonObject:
        """Return a task instance once it is in one of these states.

        Raises:
            AirflowWaitError: it took longer; the text has its last state.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            task = self.task_instance(dag_id, run_id, task_id)
            if task["state"] in states:
                return task
            if time.monotonic() > deadline:
                raise AirflowWaitError(
                    f"task {task_id!r} of run {run_id!r} was {task['state']} after {timeout_s:g} s, expected one of"
                    f" {', '.join(sorted(states))}"
                )
            time.sleep(self._poll_interval_s)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> AirflowApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run_path(self, dag_id: str, run_id: str) -> str:
        return f"/dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"

    def _task_path(self, dag_id: str, run_id: str, task_id: str) -> str:
        return f"{self._run_path(dag_id, run_id)}/taskInstances/{quote(task_id)}"

    def _json(
        self, method: str, path: str, *, body: JsonObject | None = None, params: Mapping[str, Any] | None = None
    ) -> JsonObject:
        headers = {"Authorization": f"Bearer {self.token()}", "Accept": "application/json"}
        try:
            answer = self._send(method, f"/api/v2{path}", headers=headers, body=body, params=params)
        except AirflowApiError as error:
            if error.status != 401:
                raise
            self._token = None  # expired
            headers["Authorization"] = f"Bearer {self.token()}"
            answer = self._send(method, f"/api/v2{path}", headers=headers, body=body, params=params)
        return dict(answer.json())

    def _send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: JsonObject | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        try:
            answer = self._client.request(method, path, headers=dict(headers), json=body, params=dict(params or {}))
        except httpx.HTTPError as error:
            raise AirflowApiError(
                f"{method} {self.base_url}{path}: {type(error).__name__}: {error}; is the API server running?"
            ) from error
        if answer.is_error:
            raise AirflowApiError(
                f"{method} {self.base_url}{path} answered {answer.status_code}: {answer.text[:2000]}",
                status=answer.status_code,
            )
        return answer


def _log_line(event: Any) -> str:
    if not isinstance(event, dict):
        return str(event)
    words = [str(event.get(name) or "") for name in ("timestamp", "level", "event")]
    words += [
        f"{name}={value}" for name, value in event.items() if name not in LOG_NOISE and value not in (None, "", [])
    ]
    return " ".join(word for word in words if word)
