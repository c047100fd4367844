"""Stories: tests on the real Airflow that run side by side, since most of their time is spent in waiting."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
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
    """Runs the bodies of the collected tests in threads; what one raises is raised in its own test.

    Args:
        bodies: each by what its test asks for it with.
    """

    def __init__(self, deployment: Deployment, bodies: Mapping[Hashable, Body]) -> None:
        self._deployment = deployment
        self._bodies = dict(bodies)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="story")
        self._futures: dict[Hashable, Future[None]] = {}

    def result(self, key: Hashable) -> None:
        """Wait for the end of one story, and raise what it raised."""
        self._futures[key].result()

    def __enter__(self) -> Stories:
        self._futures = {key: self._pool.submit(body, self._deployment) for key, body in self._bodies.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def bodies_of(items: Iterable[pytest.Item]) -> dict[Hashable, Body]:
    """The stories that the collected tests ask for, without those that are skipped."""
    found: dict[Hashable, Body] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("skip") is not None:
            continue
        body = getattr(item.function, "body", None)
        if body is not None:
            found[body] = body
        elif "stories" in item.fixturenames:
            case: Any = item.callspec.params["case"]
            found[case] = case.begin
    return found
