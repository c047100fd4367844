"""The Dockerfiles: what they copy is there and suffices to build the wheel, and signals reach the worker."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.deploy.files import ROOT, dockerfile
from tests.docs import commands

IMAGES = ("worker", "airflow")


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_there_and_not_ignored(name: str) -> None:
    image = dockerfile(name)
    kept = {
        line[1:]
        for line in Path(f"{image.path}.dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert set(image.copied) == kept
    for source in image.copied:
        assert (ROOT / source).exists(), source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage of the Dockerfiles builds from what they copy."""
    directory = tmp_path_factory.mktemp("image")
    for source in dockerfile("worker").copied:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, directory / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, directory / source)
    run_pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", "wheels", ".", directory=directory)
    (built,) = (directory / "wheels").glob("*.whl")
    return built


def run_pip(python: str, *words: str, directory: Path) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if "Could not find a version that satisfies the requirement" in done.stderr:
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr


def test_what_is_copied_is_enough_for_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "airflow_dbpartition/cli/__init__.py" in names
    assert "airflow_dbpartition/sql/postgresql/schema.sql" in names


@pytest.mark.slow
@pytest.mark.resilience_long
def test_the_worker_runs_on_nothing_but_its_own_dependencies(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    program = tmp_path / "venv" / "bin" / "python"
    run_pip(str(program), "install", str(wheel), directory=tmp_path)
    image = dockerfile("worker")
    environment = {**image.environment, "DBPARTITION_DATABASE_URL": f"sqlite:///{tmp_path}/jobs.sqlite"}
    for words in (["db", "upgrade"], [*image.command, "--import", "greetings", "--drain", "--health-port", "0"]):
        done = subprocess.run(
            [str(program.with_name(image.entrypoint[0])), *words],
            cwd=ROOT / "docs" / "examples",
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


def test_the_worker_is_no_root_and_gets_its_signals() -> None:
    image = dockerfile("worker")
    assert image.base == "python:3.12-slim"
    assert image.user not in ("", "root", "0")
    assert image.user.isdecimal(), "runAsNonRoot can only check a number"
    assert image.entrypoint == ["dbpartition"]
    assert image.stop_signal == "SIGTERM"
    assert commands.parse(image.command) == "worker"


def test_the_worker_has_no_airflow_and_airflow_keeps_its_version() -> None:
    assert "airflow:" not in dockerfile("worker").base
    assert dockerfile("airflow").base.startswith("apache/airflow:3.3.")
    text = dockerfile("airflow").path.read_text(encoding="utf-8")
    assert '"apache-airflow==${AIRFLOW_VERSION}"' in text


def test_variables_of_the_image_are_ones_that_a_worker_reads() -> None:
    ours = {name for name in dockerfile("worker").environment if name.startswith("DBPARTITION_")}
    assert ours
    assert ours <= commands.environment_variables()


def test_a_dockerfile_in_shell_form_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "worker.Dockerfile").write_text("FROM python:3.12-slim\nENTRYPOINT dbpartition worker\n")
    monkeypatch.setattr("tests.deploy.files.ROOT", tmp_path)
    with pytest.raises(ValueError, match="shell form"):
        dockerfile("worker")
