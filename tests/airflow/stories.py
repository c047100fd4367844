"""Stories: tests on the real Airflow that run side by side, since most of their time is spent in waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import pytest

from tests.airflow.deployment import Deployment

AT_ONCE = 8

Body = Callable[[Deployment], None]


def story(body: Body) -> Callable[[Stories], None]:
    """Make a test of a function that is given the deployment; all of them begin together.

    So a story may not disturb what it shares with others: Airflow's processes, the workers and the database.
    """

    def test(stories: Stories) -> None:
        stories.result(body)

    test.__name__ = body.__name__
    test.__doc__ = body.__doc__
    test.__module__ = body.__module__
    test.body = body  # type: ignore[attr-defined]
    return test


class Stories:
    """Runs the bodies of the collected tests in threads; what one raises is raised in its own test."""

    def __init__(self, deployment: Deployment, items: Iterable[pytest.Item]) -> None:
        self._deployment = deployment
        bodies = [getattr(getattr(item, "function", None), "body", None) for item in items]
        self._bodies: list[Body] = [body for body in bodies if body is not None]
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="story")
        self._futures: dict[Any, Future[None]] = {}

    def result(self, body: Body) -> None:
        """Wait for the end of one story, and raise what it raised."""
        self._futures[body].result()

    def __enter__(self) -> Stories:
        self._futures = {body: self._pool.submit(body, self._deployment) for body in self._bodies}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
