"""Every page: includes are what their files say, links lead somewhere, commands and variables exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

import pytest

from airflow_dbpartition.config import Timings
from airflow_dbpartition.worker.metrics import Metrics
from tests import databases
from tests.docs import commands
from tests.docs.pages import ROOT, Page, pages, script

PAGES = pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# --- code comes from files that are tested -----------------------------------------------------------------------


def test_the_reference_is_what_the_code_says() -> None:
    reference = script("print_reference")
    for name, text in reference.printed().items():
        stored = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert stored == text, f"docs/reference/{name} is out of date: python docs/print_reference.py"


@every_page
def test_included_blocks_are_what_their_files_say(page: Page) -> None:
    assert script("pull_examples").pulled(page.text) == page.text, "out of date: python docs/pull_examples.py"


@every_page
def test_every_include_is_followed_by_a_block(page: Page) -> None:
    marked = page.text.count("<!-- include: ")
    assert len(script("pull_examples").BLOCK.findall(page.text)) == marked


@every_page
def test_python_sql_and_yaml_are_always_included(page: Page) -> None:
    included = {match["text"] for match in script("pull_examples").BLOCK.finditer(page.text)}
    for language, text in page.blocks("python", "sql", "yaml"):
        assert text in included, f"{page.name}: a block of {language} that no test sees:\n{text}"


def test_a_block_that_differs_from_its_file_is_found_out() -> None:
    pull = script("pull_examples")
    page = "<!-- include: docs/examples/greetings.py#step -->\n```python\nold\n```\n"
    assert "def greet(ctx" in pull.pulled(page)
    with pytest.raises(KeyError, match="no region 'nothing'"):
        pull.pulled(page.replace("#step", "#nothing"))


# --- links -------------------------------------------------------------------------------------------------------


@every_page
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in Page(target).anchors(), f"{page.name}: {link}; there are {sorted(Page(target).anchors())}"


def test_the_index_lists_every_page() -> None:
    index = Page(ROOT / "docs" / "README.md")
    listed = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links()}
    assert {page.path for page in PAGES if page.path.parent.parent == index.path.parent} <= listed


# --- commands and variables --------------------------------------------------------------------------------------


def command_lines(page: Page) -> Iterator[str]:
    """Every `dbpartition …` of a page: in blocks of bash, in inline code, and in systemd units."""
    for _language, text in page.blocks("bash", "ini", "dockerfile"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"[|;&]+", line):
                found = re.search(r"(?:^|[\s/=])(dbpartition [a-z].*)$", part.strip())
                if found:
                    yield found[1]
    for text in page.inline_code():
        if text.startswith("dbpartition "):
            yield text


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.path.parent.name != "reference"], ids=lambda page: page.name
)
def test_command_lines_can_be_read(page: Page) -> None:
    for line in command_lines(page):
        words = shlex.split(line, comments=True)[1:]
        if len(words) == 1 or words in (["db", "sql"],):  # a command that is only named
            words = [*words, "--help"] if words[0] != "demo" else words
        if words[-1] == "--help":
            known = {name.split()[0] for name, _ in script("print_reference").command_functions()}
            assert words[0] in known, f"{page.name}: {line}"
            continue
        try:
            commands.parse(words)
        except Exception as error:  # noqa: BLE001 - Typer's own, whichever it brings
            pytest.fail(f"{page.name}: {line}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("line", ["dbpartition worker --imports steps", "dbpartition nodse --all", "dbpartition job"])
def test_a_wrong_command_line_is_found_out(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|there is no command|missing"):
        commands.parse(shlex.split(line)[1:])


@every_page
def test_environment_variables_are_ones_that_there_are(page: Page) -> None:
    tests_own = {databases.POSTGRES_VARIABLE, databases.MYSQL_VARIABLE}
    mentioned = set(re.findall(r"\bDBPARTITION_[A-Z_]+\b", page.text))
    assert mentioned <= commands.environment_variables() | tests_own


@every_page
def test_make_targets_are_ones_that_there_are(page: Page) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(
        r"^make ([a-z]+)", "\n".join([*page.inline_code(), *(text for _, text in page.blocks("bash"))]), re.M
    )
    assert set(named) <= targets


def test_metrics_that_are_named_are_ones_that_a_worker_serves() -> None:
    served = {item.name + ("_total" if item.type == "counter" else "") for item in Metrics().registry.collect()}
    named = {
        name
        for page in PAGES
        for text in page.inline_code()
        for name in re.findall(r"^dbpartition_\w+_(?:total|seconds|running)$", text)
    }
    assert len(named) > 3
    assert named <= served


# --- numbers -----------------------------------------------------------------------------------------------------


def test_the_defaults_in_the_guide_to_intervals_are_the_defaults() -> None:
    page = Page(ROOT / "docs" / "how-to" / "tune-the-intervals.md")
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([\d.]+) s \|", page.text, re.MULTILINE)
    told = {f"{name.replace('-', '_')}_s": float(value) for name, value in rows}
    timings = Timings()
    assert told == {name: getattr(timings, name) for name in told}
    assert len(told) == 6
    assert f"{timings.remove_after_s - timings.heartbeat_s:g} to " in page.text


@pytest.mark.parametrize("name", ["protocol", "failure-model"])
def test_the_moments_in_the_explanations_are_the_defaults(name: str) -> None:
    text = Page(ROOT / "docs" / "explanation" / f"{name}.md").text
    timings = Timings()
    for seconds in (timings.unreachable_after_s, timings.fence_after_s, timings.remove_after_s):
        assert f"{seconds:g} s" in text


# --- words -------------------------------------------------------------------------------------------------------


@every_page
def test_words_are_ours(page: Page) -> None:
    assert not re.findall(r"(?i)\b(?:master|slave|helper|utils?)\b", page.prose)


def _messages() -> Iterator[str]:
    """Every text in the code, with … for what is filled in."""
    for path in (ROOT / "airflow_dbpartition").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_explained_are_ones_that_the_code_says() -> None:
    page = Page(ROOT / "docs" / "how-to" / "troubleshoot.md")
    explained = re.findall(r"^\| `([^`]+)`", page.text, re.MULTILINE)
    assert len(explained) > 20
    known = "\n".join(_messages())
    for message in explained:
        fragments = [fragment.strip(" :,;'") for fragment in re.split(r"…|'[^']*'|\d+", message)]
        for fragment in filter(None, fragments):
            assert fragment in known, f"nothing in the code says {fragment!r} ({message!r})"
