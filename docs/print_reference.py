"""Print the pages of docs/reference from the code: `python docs/print_reference.py` (with --check: only compare)."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from prometheus_client import Metric

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import column_texts  # type: ignore[import-not-found,unused-ignore]
import semantics_page  # type: ignore[import-not-found,unused-ignore]

from airflow_dbpartition import (
    assignment,
    cli,
    config,
    decorators,
    domain,
    errors,
    hooks,
    operators,
    partitioners,
    sensors,
    testing,
    triggers,
    views,
    worker,
)
from airflow_dbpartition.migrations import DIALECTS
from airflow_dbpartition.provider_info import get_provider_info
from airflow_dbpartition.schema import VERSION_TABLE, build_tables
from airflow_dbpartition.worker.context import Checkpoint
from airflow_dbpartition.worker.metrics import Metrics

FOLDER = Path(__file__).resolve().parent / "reference"
HEADER = "<!-- Printed from the code by docs/print_reference.py; do not edit. -->\n"
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)


# --- Markdown ----------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; bars in its cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


def code(value: object) -> str:
    return f"`{value}`"


def flowing(text: str) -> str:
    return " ".join(text.split())


# --- docstrings --------------------------------------------------------------------------------------------------


def sections(documented: Any) -> tuple[str, dict[str, dict[str, str]]]:
    """A docstring as its body and its sections, each of name -> text."""
    parts = SECTION.split(inspect.cleandoc(documented.__doc__ or ""))
    body, found = parts[0].strip(), {}
    for name, block in zip(parts[1::2], parts[2::2], strict=True):
        indented, _, after = re.sub(r"\n(?=\S)", "\x00", block.strip("\n"), count=1).partition("\x00")
        body += f"\n\n{after.strip()}" if after.strip() else ""
        found[name] = entries(textwrap.dedent(indented))
    return body, found


def entries(block: str) -> dict[str, str]:
    """`name: text` entries, where further lines of a text are indented."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", block.strip()):
        names, colon, text = entry.partition(":")
        if not colon:
            names, text = "", entry
        for name in names.split(", "):
            found[name.strip()] = flowing(text)
    return found


def arguments(function: Any, texts: dict[str, str]) -> str:
    """A table of a function's arguments, with what the docstring says of each."""
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        default = "required" if parameter.default is parameter.empty else code(repr(parameter.default))
        stars = {"VAR_KEYWORD": "**", "VAR_POSITIONAL": "*"}.get(parameter.kind.name, "")
        if stars:
            default = ""
        kind = "" if parameter.annotation is parameter.empty else code(parameter.annotation)
        rows.append([code(stars + name), kind, default, texts.get(name, "")])
    return table(["argument", "type", "default", ""], rows) if rows else ""


def class_entry(documented: type, *, level: int = 2, methods: Sequence[str] = ()) -> Iterator[str]:
    """A class: what it is, its arguments, and some of its methods."""
    body, found = sections(documented)
    yield f"{'#' * level} {documented.__name__}\n"
    yield body + "\n"
    if vars(documented).get("__init__") is not None and "Args" in found:
        yield arguments(vars(documented)["__init__"], found["Args"])
    elif "Args" in found:
        yield arguments(documented, found["Args"])
    if "Attributes" in found:
        yield table(["attribute", ""], [[code(name), text] for name, text in found["Attributes"].items()])
    yield from raised(found)
    for name in methods:
        yield from function_entry(getattr(documented, name), f"{documented.__name__}.{name}", level=level + 1)


def function_entry(documented: Any, title: str, *, level: int = 3) -> Iterator[str]:
    if isinstance(documented, property):
        yield f"{'#' * level} {title}\n"
        yield sections(documented)[0] + "\n"
        return
    body, found = sections(documented)
    yield f"{'#' * level} {title}()\n"
    yield body + "\n"
    listed = arguments(documented, found.get("Args", {}))
    if listed:
        yield listed
    if "Returns" in found:
        yield f"Returns: {flowing(' '.join(found['Returns'].values()))}\n"
    yield from raised(found)


def raised(found: dict[str, dict[str, str]]) -> Iterator[str]:
    if "Raises" in found:
        words = "; ".join(
            f"`{name}`: {text.rstrip('.')}" if text else f"`{name}`" for name, text in found["Raises"].items()
        )
        yield f"Raises {words}\n"


def settings_entry(documented: Any) -> Iterator[str]:
    """A settings class: field, default, meaning."""
    body, found = sections(documented)
    yield f"## {documented.__name__}\n"
    yield body + "\n"
    rows = []
    for item in fields(documented):
        default = item.default if item.default is not MISSING else None
        if item.default_factory is not MISSING:
            default = item.default_factory()
        shown = "required" if item.default is MISSING and item.default_factory is MISSING else code(repr(default))
        if type(default).__module__.startswith("airflow_dbpartition"):
            shown = f"`{type(default).__name__}()`"
        rows.append([code(item.name), shown, found["Args"].get(item.name, "")])
    yield table(["field", "default", ""], rows)


# --- the pages ---------------------------------------------------------------------------------------------------


def command_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command of `dbpartition` and its function."""
    app = cli.application()
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__, command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            assert command.callback is not None
            yield f"{group.name} {command.name or command.callback.__name__}", command.callback


def parameters_of(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, Typer's description, default) of every parameter of a command."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if not hasattr(hint, "__metadata__"):  # Python 3.10 wraps it in Optional where the default is None
            hint = get_args(hint)[0]
        yield name, hint.__metadata__[0], parameter.default


def flags_of(name: str, info: Any) -> list[str]:
    """The option as it is typed; Typer keeps the first declaration where the default would be."""
    declared = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    return [word for word in declared if word.startswith("-")] or [f"--{name.replace('_', '-')}"]


def environment_variables() -> dict[str, str]:
    """Every variable that an option reads, and what the option is for."""
    found: dict[str, str] = {}
    for _name, function in command_functions():
        for _parameter, info, _default in parameters_of(function):
            if info.envvar:
                found.setdefault(str(info.envvar), info.help or "")
    return found


def command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield (
        "Exit codes: 0 well, 1 error, 2 usage, 3 work failed. An error is one line on stderr; `-v` adds the traceback. "
        "An option wins over its environment variable.\n"
    )
    for command, function in sorted(command_functions()):
        positional = [info.metavar for _, info, _ in parameters_of(function) if is_argument(info)]
        yield f"## dbpartition {' '.join([command, *positional])}\n"
        yield flowing(function.__doc__ or "") + "\n"
        rows = []
        for name, info, default in parameters_of(function):
            if is_argument(info):
                continue
            flag = ", ".join(flags_of(name, info))
            variable = code(info.envvar) if info.envvar else ""
            shown = "required" if default is inspect.Parameter.empty else code(default)
            if default in ("", None) or default is False:
                shown = ""
            rows.append([code(flag), variable, shown, info.help or ""])
        yield table(["option", "environment variable", "default", ""], rows)


def is_argument(info: Any) -> bool:
    return isinstance(info, typer.models.ArgumentInfo)


def airflow_side() -> Iterator[str]:
    yield "# Operators, sensors, hook and triggers\n"
    kinds: Sequence[Any] = (operators.PartitionedStepOperator, sensors.PartitionCompletionSensor)
    for kind in kinds:
        yield from templated_entry(kind)
    yield from function_entry(decorators.partitioned_step_task, "@task.partitioned_step", level=2)
    yield from templated_entry(sensors.LiveNodesSensor)
    for housekeeper in (operators.StopJobExecutionOperator, operators.PurgeJobRepositoryOperator):
        yield from class_entry(housekeeper)
        yield "Every argument of its own may be a template.\n"
    yield from class_entry(
        hooks.JobRepositoryHook, methods=["repository", "summary", "iter_results", "test_connection"]
    )
    yield "### The connection's form\n"
    kind = get_provider_info()["connection-types"][0]
    rows = [
        [code(name), item["label"], item.get("description", ""), ", ".join(item["schema"].get("enum", []))]
        for name, item in kind["conn-fields"].items()
    ]
    yield f"Connection type `{kind['connection-type']}`. Extras that the form has fields for:\n"
    yield table(["extra", "label", "", "values"], rows)
    for trigger in (triggers.PartitionCompletionTrigger, triggers.JobLaunchTrigger, triggers.LiveNodesTrigger):
        yield from class_entry(trigger)


def templated_entry(kind: Any) -> Iterator[str]:
    yield from class_entry(kind)
    yield f"Fields that may be templates: {', '.join(code(name) for name in sorted(kind.template_fields))}.\n"


def airflow_semantics() -> Iterator[str]:
    yield "# What each click does\n"
    yield semantics_page.INTRODUCTION
    for title, heads, rows in semantics_page.tables():
        yield f"## {title}\n"
        yield table(heads, rows)


def partitioning() -> Iterator[str]:
    yield "# Partitioners and assignment\n"
    for kind in (
        partitioners.ColumnRangePartitioner,
        partitioners.FilesPartitioner,
        partitioners.S3KeysPartitioner,
        partitioners.ListPartitioner,
        partitioners.QueryPartitioner,
        partitioners.SimplePartitioner,
        partitioners.FunctionPartitioner,
    ):
        yield from class_entry(kind)
    yield from class_entry(domain.Partition)
    yield from class_entry(partitioners.Partitioner, methods=["partition"])
    yield "# Assignment\n"
    for strategy in (assignment.RoundRobin, assignment.FixedNodeCount, assignment.LeastLoaded, assignment.Unassigned):
        yield from class_entry(strategy)
        if strategy is not assignment.FixedNodeCount:
            yield f'In short: `assignment="{strategy.name}"`.\n'
    yield from class_entry(assignment.AssignmentStrategy, methods=["assign"])


def steps() -> Iterator[str]:
    yield "# Steps\n"
    yield "`from airflow_dbpartition.worker import " + ", ".join(sorted(worker.__all__)) + "`\n"
    yield from function_entry(worker.step, "step", level=2)
    yield from class_entry(
        worker.PartitionContext,
        methods=[
            "transaction",
            "read_keyset",
            "idempotency_key",
            "should_stop",
            "raise_if_stopping",
            "engine",
        ],
    )
    yield from class_entry(Checkpoint, methods=["save"])
    yield from class_entry(worker.ChunkStep)
    yield from class_entry(worker.KeysetReader)
    yield from function_entry(worker.s3_keys, "s3_keys", level=2)


def tests() -> Iterator[str]:
    yield "# Testing\n"
    yield f"`from {testing.__name__} import {', '.join(sorted(testing.__all__))}`\n"
    yield "See [Test your DAG](../how-to/test-your-dag.md).\n"
    for function in (testing.local_worker, testing.local_job_repository, testing.run_pending):
        yield from function_entry(function, function.__name__, level=2)
    yield from class_entry(testing.LocalJobRepository, methods=["submit", "summary", "results", "errors", "report"])


def settings() -> Iterator[str]:
    yield "# Settings\n"
    for kind in (config.Timings, config.WorkerConfig, config.DatabaseConfig, domain.JobSettings):
        yield from settings_entry(kind)
    yield "## Environment variables\n"
    yield table(["variable", ""], [[code(name), text] for name, text in sorted(environment_variables().items())])
    yield "## Metrics\n"
    yield "Served by a worker at `/metrics` when it has a `--health-port`.\n"
    registered: list[Metric] = list(Metrics().registry.collect())
    yield table(
        ["metric", "type", ""],
        [
            [code(item.name + ("_total" if item.type == "counter" else "")), item.type, item.documentation]
            for item in sorted(registered, key=lambda item: item.name)
        ],
    )


def tables() -> Iterator[str]:
    yield "# Tables and views\n"
    yield (
        "Times are set by the database's clock, in UTC. The DDL for each database is in `sql/`, or printed by "
        "`dbpartition db sql`.\n"
    )
    built = build_tables()
    dialects: list[Any] = [dialect() for dialect in DIALECTS.values()]
    for one in built.all:
        about, texts = column_texts.TABLES[one.name]
        yield f"## {one.name}\n"
        yield about + "\n"
        rows = [
            [
                code(column.name) + (" (key)" if column.primary_key else ""),
                *(code(column.type.compile(dialect).lower()) for dialect in dialects),
                "yes" if column.nullable else "",
                texts[column.name],
            ]
            for column in one.columns
        ]
        yield table(["column", "PostgreSQL", "MySQL, MariaDB", "SQLite", "NULL", ""], rows)
    yield f"## {VERSION_TABLE}\n"
    yield "The revision of the schema, as Alembic keeps it; ours alone, whatever else is in the database.\n"
    for name, query in views.view_queries(built).items():
        yield f"## {name} (view)\n"
        yield column_texts.VIEWS[name] + "\n"
        yield "Columns: " + ", ".join(code(column.name) for column in query.selected_columns) + ".\n"


def states() -> Iterator[str]:
    yield "# States\n"
    yield "## Partition\n"
    for kind in (domain.PartitionStatus, domain.ExecutionStatus, domain.NodeStatus):
        if kind is domain.ExecutionStatus:
            yield "## Job execution\n"
        if kind is domain.NodeStatus:
            yield "## Node\n"
        yield flowing(kind.__doc__ or "") + "\n"
        yield ", ".join(code(status.value) for status in kind) + "\n"
        if kind is domain.PartitionStatus:
            yield from transitions()
    yield "## Events\n"
    yield flowing(domain.PartitionEvent.__doc__ or "") + "\n"
    yield table(
        ["event", ""], [[code(event.value), column_texts.EVENTS[event.value]] for event in domain.PartitionEvent]
    )
    yield "## Transfer policy\n"
    yield flowing(domain.TransferPolicy.__doc__ or "").removesuffix(".") + ".\n"


def transitions() -> Iterator[str]:
    rows = []
    for name, move in vars(domain.Transitions).items():
        if isinstance(move, domain.Transition):
            who, guard = column_texts.TRANSITIONS[name]
            sources = ", ".join(status.value for status in move.sources)
            grows = "grows" if move.changes_hands else ""
            rows.append([move.name, f"{sources} → {move.target.value}", who, guard, grows])
    yield table(["transition", "from → to", "by", "guard beyond the status", "version"], rows)


def exceptions() -> Iterator[str]:
    yield "# Exceptions\n"
    yield f"From `{errors.__name__}`.\n"
    first, _, tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")
    yield first.partition(". ")[2] + "\n"
    yield f"```text\n{tree}\n```\n"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "command-line.md": command_line,
    "airflow.md": airflow_side,
    "airflow-semantics.md": airflow_semantics,
    "partitioners.md": partitioning,
    "steps.md": steps,
    "testing.md": tests,
    "settings.md": settings,
    "tables.md": tables,
    "states.md": states,
    "exceptions.md": exceptions,
}


def printed() -> dict[str, str]:
    """Every page by its name."""
    return {name: "\n".join([HEADER, *page()]) for name, page in PAGES.items()}


def main(arguments: list[str]) -> int:
    differing = []
    for name, text in printed().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    for name in differing:
        sys.stdout.write(f"docs/reference/{name}\n")
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
