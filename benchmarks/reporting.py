"""What a benchmark found: figures of several rounds, targets that were met or missed, and where it ran."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Rounds:
    """One figure, measured once in each round. It is shown as its median."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Rounds:
        """The figure of each round, in turn."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)


Cell = str | int | float | Rounds


@dataclass(frozen=True)
class Target:
    """A figure beside what it is to reach.

    Args:
        what: the figure, in words.
        measured: the figure.
        limit: what it is held against: a constant, or another measured figure.
        factor: `measured` is to be at least (or at most) this times the limit.
        at_least: whether more is better.
        against: the limit, in words.
    """

    what: str
    measured: float
    limit: float
    against: str
    factor: float = 1.0
    at_least: bool = True

    @property
    def ratio(self) -> float:
        return self.measured / self.limit if self.limit else float("inf")

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.factor if self.at_least else self.ratio <= self.factor

    @property
    def wanted(self) -> str:
        times = "" if self.factor == 1 else f"{self.factor:g} × "
        return f"{'at least' if self.at_least else 'at most'} {times}{self.against}"


@dataclass(frozen=True)
class Machine:
    """Where and when it was measured."""

    cores: int
    python: str
    postgresql: str
    load_average_before: float
    date: str

    @classmethod
    def now(cls, postgresql: str = "") -> Machine:
        """Ask before the first round, or the load is our own."""
        return cls(
            cores=os.cpu_count() or 0,
            python=platform.python_version(),
            postgresql=postgresql,
            load_average_before=round(os.getloadavg()[0], 2),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        )


@dataclass
class Report:
    """One table of figures and one of targets.

    Args:
        name: of its files in benchmarks/results.
        title: heading.
        columns: of the rows, in order.
        rows: cells by column; a missing one stays empty.
        machine: where it ran.
        targets: what was to be reached.
        notes: how it was measured, and what a reader has to know; one sentence or more each.
        decimals: of every figure that is not an integer.
    """

    name: str
    title: str
    columns: Sequence[str]
    machine: Machine
    rows: list[Mapping[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: Sequence[str] = ()
    decimals: int = 1

    def markdown(self) -> str:
        """Return both tables, the notes and the machine."""
        lines = [f"## {self.title}", "", *_table(self.columns, [self._shown(row) for row in self.rows])]
        if self.targets:
            cells = [
                (
                    target.what,
                    self._number(target.measured),
                    self._number(target.limit),
                    f"{target.ratio:.2f}",
                    target.wanted,
                    "met" if target.is_met else "**missed**",
                )
                for target in self.targets
            ]
            lines += ["", *_table(("what", "measured", "against", "ratio", "target", ""), cells)]
        where = self.machine
        server = f", PostgreSQL {where.postgresql}" if where.postgresql else ""
        notes = [
            *self.notes,
            f"{where.cores} cores, Python {where.python}{server}, load average {where.load_average_before:g} before, "
            f"{where.date}.",
        ]
        return "\n".join([*lines, "", *(f"* {note}" for note in notes)]) + "\n"

    def write(self, directory: Path = RESULTS) -> None:
        """Write `<name>.md`, and `<name>.json` with the figures of all rounds."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self.name}.md").write_text(self.markdown())
        (directory / f"{self.name}.json").write_text(json.dumps(self._json(), indent=2, ensure_ascii=False) + "\n")

    def _shown(self, row: Mapping[str, Cell]) -> list[str]:
        return [self._cell(row.get(column, "")) for column in self.columns]

    def _cell(self, cell: Cell) -> str:
        if isinstance(cell, str):
            return cell
        return self._number(cell.median if isinstance(cell, Rounds) else cell)

    def _number(self, value: float) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.{self.decimals}f}"

    def _json(self) -> dict[str, object]:
        def plain(cell: Cell) -> object:
            return {"median": cell.median, "rounds": list(cell.values)} if isinstance(cell, Rounds) else cell

        return {
            "title": self.title,
            "machine": asdict(self.machine),
            "rows": [{name: plain(cell) for name, cell in row.items()} for row in self.rows],
            "targets": [{**asdict(target), "ratio": target.ratio, "met": target.is_met} for target in self.targets],
            "notes": list(self.notes),
        }


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(columns), line(["---"] * len(columns)), *map(line, rows)]
