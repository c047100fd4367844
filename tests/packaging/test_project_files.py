"""The project's own files: what must be there, what README promises, and what no file may hold."""

from __future__ import annotations

import re

import pytest

from tests.packaging.tree import ROOT, tracked

TOP_LEVEL = (
    "pyproject.toml", "README.md", "LICENSE", "Makefile", "docker-compose.yaml",
    "airflow_dbpartition", "dags", "sql", "tests", "docs", "deploy", ".ci",
)  # fmt: skip

# Written so that this file does not hold what it looks for.
HOME_FOLDERS = re.compile(r"(?<![\w.$})])/(?:root|home/[a-z]\w*|Users/\w+|work)/[\w.]")
REGISTRIES = re.compile(
    r"(?:pypi\.(?:org|python)|files\.pythonhosted|registry\.npmjs|registry\.yarnpkg|deb\.debian|proxy\.golang)", re.I
)
# Paths inside images that the deployment's own files make.
IN_IMAGES = {"/home/airflow/"}


def lines_with(pattern: re.Pattern[str], text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        for match in pattern.finditer(line):
            if not any(line.startswith(place, match.start()) for place in IN_IMAGES):
                found.append(line.strip())
    return found


def in_files(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {line[:200]}" for line in lines_with(pattern, text)]
    return found


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_top_level_is_as_it_was_agreed(name: str) -> None:
    if name == ".ci" and not (ROOT / ".git").exists():
        pytest.skip("a source distribution has no continuous integration")
    assert (ROOT / name).exists()


def test_files_are_found_at_all() -> None:
    names = {str(path.relative_to(ROOT)) for path in tracked()}
    assert {"README.md", "pyproject.toml", "airflow_dbpartition/__init__.py"} <= names
    assert not any("__pycache__" in name for name in names)


def _targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))


def test_every_make_target_that_is_written_about_exists() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    asked = {
        (target, page.name)
        for page in pages
        for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"demo", "test"} <= {target for target, _ in asked}
    assert [item for item in sorted(asked) if item[0] not in _targets()] == []


def test_every_make_target_is_phony_and_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.M)
    assert set(phony.split()) == _targets()
    assert set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.M)) == _targets()


def test_continuous_integration_runs_all_tests() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a source distribution has no continuous integration")
    assert re.search(r"^(?:exec )?make test$", script.read_text(encoding="utf-8"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^test: lint types imports\b", makefile, re.M)
    assert re.search(r"^\t\S+python -m pytest \$\(PYTEST_ARGS\)$", makefile, re.M)


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
    assert in_files(HOME_FOLDERS) == []


def test_no_file_names_the_host_of_a_package_registry() -> None:
    assert in_files(REGISTRIES) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (HOME_FOLDERS, "cd /" + "root/project"),
        (HOME_FOLDERS, "PATH=/" + "home/somebody/bin"),
        (HOME_FOLDERS, "open('/" + "Users/somebody/x')"),
        (HOME_FOLDERS, "see /" + "work/main/x"),
        (REGISTRIES, "pip install -i https://py" + "pi.org/simple x"),
        (REGISTRIES, "https://files.python" + "hosted.org/x"),
    ],
)
def test_what_no_file_may_hold_is_recognised(pattern: re.Pattern[str], text: str) -> None:
    assert lines_with(pattern, text) == [text]


@pytest.mark.parametrize("text", ["$(pwd)/work/x", "tests/work/x", "/home/airflow/.local", "roots/work"])
def test_what_every_file_may_hold_is_left_alone(text: str) -> None:
    assert lines_with(HOME_FOLDERS, text) == []
