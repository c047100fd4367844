"""The same computation without us: a pool of processes on one machine, each of which takes the next range."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence

import steps_of_speed_up
from sqlalchemy import Engine, create_engine

_engines: list[Engine] = []


def _connect(url: str) -> None:
    _engines.append(create_engine(url))


def _compute(limits: tuple[int, int]) -> dict[str, float]:
    with _engines[0].connect() as connection:
        return steps_of_speed_up.delay_interval(connection, *limits)


def seconds(url: str, ranges: Sequence[tuple[int, int]], processes: int) -> float:
    """How long so many processes take, from when they have started and are connected."""
    with multiprocessing.get_context("spawn").Pool(processes, _connect, (url,)) as pool:
        pool.map(_compute, ranges[:processes], chunksize=1)
        begun = time.perf_counter()
        pool.map(_compute, ranges, chunksize=1)
        return time.perf_counter() - begun
