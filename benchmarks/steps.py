"""Steps of the benchmarks."""

from __future__ import annotations

import time
from pathlib import Path

from entries import entered

from airflow_dbpartition.worker import PartitionContext, step


@step("hold")
def hold(ctx: PartitionContext) -> None:
    """Say when user code was entered, then hold on until asked to stop."""
    trace = Path(ctx.context["trace"])
    with trace.open("a") as file:
        file.write(f"{ctx.context['job']} {ctx.node_id} {time.time()}\n")
    while True:
        ctx.raise_if_stopping()
        time.sleep(0.05)


@step("end_at")
def end_at(ctx: PartitionContext) -> None:
    """Complete at a given moment, by the clock of this machine."""
    time.sleep(max(0.0, ctx.context["moment"] - time.time()))


@step("noop")
def noop(_ctx: PartitionContext) -> None:
    """Do nothing, but for saying that user code was entered."""
    entered()
