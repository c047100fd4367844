"""What the table of clicks is made of: no cell comes without its proof, or the reason why there is no such case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.airflow.deployment import Deployment
from tests.airflow.semantics.ways import WAYS, Way

Story = Callable[[Deployment, Way], None]
"""Disturbs nothing that is shared, and so runs beside others."""

Tale = Callable[[Deployment, Way], Iterator[None]]
"""Yields where a shared process is to be harmed: once for each of the row's `harms`."""

Harm = Callable[[Deployment], None]


@dataclass(frozen=True, eq=False)
class Cell:
    """What happens, in words for the page, and what proves it.

    Args:
        words: with a proof, what happens to execution, partitions and task; without, why there is no such case.
        proof: None = there is no such case.
        essential: whether `make test` runs it.
    """

    words: str
    proof: Story | Tale | None
    essential: bool = False


Cells = Mapping[Way, Cell]


@dataclass(frozen=True, eq=False)
class Row:
    """One event, and a cell for each way.

    Args:
        name: in the ids of tests.
        title: on the page.
        cells: of every way.
        harms: done to shared processes, one after the other; a row with harms runs alone.
    """

    name: str
    title: str
    cells: Cells
    harms: tuple[Harm, ...] = ()

    def __post_init__(self) -> None:
        missing = [way.name for way in WAYS if way not in self.cells]
        assert not missing, f"row {self.name!r} says nothing about {missing}"


@dataclass(frozen=True, eq=False)
class Chapter:
    """Rows that belong together on the page."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """One cell with a proof, as a test runs it."""

    row: Row
    way: Way
    cell: Cell = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.row.name}-{self.way.name}"

    def begin(self, deployment: Deployment) -> Any:
        """Call the proof: a story has been told then; a tale is to be driven from harm to harm."""
        assert self.cell.proof is not None
        return self.cell.proof(deployment, self.way)


def proven(ways: Iterable[Way], words: str, proof: Story | Tale, *, essential: Iterable[Way] = ()) -> dict[Way, Cell]:
    """The same cell for several ways, each proven for itself."""
    chosen = set(essential)
    return {way: Cell(words, proof, essential=way in chosen) for way in ways}


def absent(ways: Iterable[Way], reason: str) -> dict[Way, Cell]:
    """Cells of cases that there are not."""
    return {way: Cell(reason, None) for way in ways}


def cases(chapters: Iterable[Chapter], *, harmed: bool) -> list[Case]:
    """Every cell that has a proof, of the rows with harms or of those without."""
    return [
        Case(row, way, row.cells[way])
        for chapter in chapters
        for row in chapter.rows
        if bool(row.harms) == harmed
        for way in WAYS
        if row.cells[way].proof is not None
    ]
