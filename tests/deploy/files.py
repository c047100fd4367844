"""The deployment files, read: compose with its defaults filled in, Dockerfiles, Kubernetes manifests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def compose() -> dict[str, Any]:
    """docker-compose.yaml as Docker reads it where no variable is set.

    Raises:
        KeyError: a variable has no default.
    """
    text = (ROOT / "docker-compose.yaml").read_text(encoding="utf-8")

    def default(match: re.Match[str]) -> str:
        if match["default"] is None:
            raise KeyError(f"docker-compose.yaml: {match['name']} has no default")
        return match["default"]

    loaded: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(default, text))
    return loaded


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes manifest."""
    return [
        document
        for path in sorted(KUBERNETES.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document
    ]


@dataclass
class Dockerfile:
    """What a Dockerfile says, in its last stage unless noted."""

    path: Path
    base: str = ""
    copied: list[str] = field(default_factory=list)  # from the build context, in any stage
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    stop_signal: str = ""
    workdir: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def dockerfile(name: str) -> Dockerfile:
    """One of deploy/*.Dockerfile.

    Raises:
        ValueError: ENTRYPOINT or CMD is in shell form.
    """
    path = ROOT / "deploy" / f"{name}.Dockerfile"
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    found = Dockerfile(path)
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found = Dockerfile(path, base=rest.split()[0], copied=found.copied)
        elif word == "COPY" and not rest.startswith("--from="):
            found.copied += rest.split()[:-1]
        elif word == "USER":
            found.user = rest
        elif word == "WORKDIR":
            found.workdir = rest
        elif word == "STOPSIGNAL":
            found.stop_signal = rest
        elif word == "ENV":
            found.environment |= {name: value for name, _, value in (pair.partition("=") for pair in rest.split())}
        elif word in ("ENTRYPOINT", "CMD"):
            try:
                words = json.loads(rest)
            except json.JSONDecodeError:
                raise ValueError(
                    f"{path.name}: {word} is in shell form, which keeps signals from the process"
                ) from None
            if word == "CMD":
                found.command = words
            else:
                found.entrypoint = words
    return found
