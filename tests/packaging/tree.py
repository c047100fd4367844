"""The project's tree and the files in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {"__pycache__", "dist", "build", "node_modules"}


def tracked() -> list[Path]:
    """Every file of the project: what git tracks, or the tree where there is no git (a source distribution)."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(_hidden(part) for part in path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def _hidden(part: str) -> bool:
    return part in _NOT_OURS or (part.startswith(".") and part != ".ci")
