"""Following one job execution on a terminal: a bar, the partitions by node, and what was not the happy path."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from airflow_dbpartition.domain import PartitionStatus
from airflow_dbpartition.failure_texts import headline
from airflow_dbpartition.repository import JobRepository
from airflow_dbpartition.repository.reading import EventRow

_EVENTS_SHOWN = 6
_PLAIN_EVERY = 0.1  # of the work, where the output is no terminal


@dataclass
class Picture:
    """What is known of the execution now."""

    job_execution_id: int
    total: int = 0
    done: int = 0
    running: int = 0
    rows_written: int = 0
    by_node: dict[str, dict[PartitionStatus, int]] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)
    moved: bool = False  # a lost node's running partition has been given to another
    moved_and_running: bool = False

    @property
    def part_done(self) -> float:
        return self.done / self.total if self.total else 0.0


def look(repository: JobRepository, job_execution_id: int) -> Picture:
    """Read the picture from the database, as any person could."""
    now = repository.reading.progress([job_execution_id])[job_execution_id]
    summary = repository.reading.summary(job_execution_id)
    moved = [row for row in repository.reading.partitions(job_execution_id) if row.node_losses]
    return Picture(
        job_execution_id=job_execution_id,
        total=now.total,
        done=now.done,
        running=now.counts.get(PartitionStatus.CLAIMED, 0),
        rows_written=summary.counters["write"],
        by_node=repository.reading.running_by_node(job_execution_id),
        events=repository.reading.events(job_execution_id),
        moved=bool(moved),
        moved_and_running=any(row.status is not PartitionStatus.PENDING for row in moved),
    )


class Screen:
    """Shows pictures: redrawn in place on a terminal, else one line at each tenth of the work and at each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("partitions", total=None, detail="")
        self._notes: list[str] = []
        self._events_said = 0
        self._next_line = 0.0
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Something that the demo did itself."""
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        self._notes.append(line)
        if not self._console.is_terminal:
            self._say(line)

    def show(self, picture: Picture) -> None:
        detail = f"{picture.running} running, {picture.rows_written:,} flights written"
        if not self._console.is_terminal:
            self._show_plain(picture, detail)
            return
        self._bar.update(self._task, total=picture.total, completed=picture.done, detail=detail)
        drawing = Group(
            self._bar,
            _nodes_table(picture),
            *(Text(f"  {line}", style="yellow") for line in self._notes),
            *(Text(f"  {_words(event)}", style="red") for event in picture.events[-_EVENTS_SHOWN:]),
        )
        if self._live is None:
            self._live = Live(drawing, console=self._console, refresh_per_second=8)
            self._live.start()
        self._live.update(drawing)

    def _show_plain(self, picture: Picture, detail: str) -> None:
        for event in picture.events[self._events_said :]:
            self._say(f"{time.monotonic() - self._began:5.1f} s  {_words(event)}")
        self._events_said = len(picture.events)
        if picture.part_done >= self._next_line:
            self._next_line = picture.part_done + _PLAIN_EVERY
            nodes = ", ".join(
                f"{node or 'unassigned'}: {sum(counts.values())}" for node, counts in sorted(picture.by_node.items())
            )
            done = f"{picture.done}/{picture.total} partitions"
            self._say(f"{time.monotonic() - self._began:5.1f} s  {done}, {detail} ({nodes})")

    def _say(self, line: str) -> None:
        self._console.print(f"  {line}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _nodes_table(picture: Picture) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", min_width=20)
    for status in PartitionStatus:
        table.add_column(status.value.lower(), justify="right")
    for node, counts in sorted(picture.by_node.items()):
        table.add_row(node or "(nobody yet)", *(str(counts.get(status, "")) for status in PartitionStatus))
    return table


def _words(event: EventRow) -> str:
    return f"{event.event}: {event.partition_key}: {headline(event.message)}"
