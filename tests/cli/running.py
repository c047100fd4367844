"""Runs `dbpartition`: in this process where only its words matter, as a process where streams and signals do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_dbpartition.cli import main
from tests.databases import Database

STEPS = """\
from airflow_dbpartition.worker import step

@step("work")
def work(ctx):
    if ctx.context.get("fail"):
        raise ValueError("it is broken")
    return {"got": ctx.context["number"]}
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)

    def well(self) -> Outcome:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self

    def refused(self, code: int, *words: str) -> str:
        """One clear line on stderr with all these words, this exit code, nothing on stdout, no traceback."""
        lines = [line for line in self.err.splitlines() if line]
        assert "Traceback" not in self.err, self.err
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), lines[0]
        assert [word for word in words if word not in lines[0]] == [], lines[0]
        assert (self.code, self.out) == (code, "")
        return lines[0]


Run = Callable[..., Outcome]


def clean_environment() -> dict[str, str]:
    """This process's environment without any of our variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DBPARTITION_")}


def variables(database: Database) -> dict[str, str]:
    """The environment that leads to a database."""
    found = {"DBPARTITION_DATABASE_URL": database.url}
    if database.schema is not None:
        found["DBPARTITION_SCHEMA"] = database.schema
    return found


def in_process(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    """Run it here, in the environment as it is."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    code = left.value.code
    assert isinstance(code, int)
    return Outcome(code, out, err)


def start(
    *words: object,
    database: Database | None = None,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start it as a process of its own, streams piped, in an environment of which only what is given is ours."""
    given = {**clean_environment(), **(variables(database) if database else {}), **(environment or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "airflow_dbpartition.cli", *(str(word) for word in words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        cwd=directory,
        env=given,
    )


def as_process(*words: object, stdin: str = "", timeout_s: float = 60, **options: Any) -> Outcome:
    """Run it as a process of its own, to its end."""
    with start(*words, **options) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        finally:
            process.kill()
    return Outcome(process.returncode, out, err)


def steps_module(directory: Path, text: str = STEPS, name: str = "steps_of_test") -> str:
    """Write a module of steps; returns its name."""
    (directory / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def drain(database: Database, directory: Path, *words: object, text: str = STEPS) -> Outcome:
    """Let a real worker do all the work there is."""
    module = steps_module(directory, text)
    quick = ("--heartbeat", "0.3", "--unreachable-after", "1", "--remove-after", "3", "--poll", "0.1")
    return as_process(
        "worker", "--import", module, "--drain", "--executor", "thread", *quick, *words,
        database=database, directory=directory,
    )  # fmt: skip
