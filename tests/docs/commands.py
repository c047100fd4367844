"""What the command line knows: its options' environment variables, and whether a line of words can be read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, get_args, get_type_hints

import typer

from airflow_dbpartition.cli import application


def environment_variables() -> frozenset[str]:
    """Every environment variable that an option of `dbpartition` reads."""
    app = application()
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    callbacks = [command.callback for group in groups if group is not None for command in group.registered_commands]
    return frozenset(variable for callback in callbacks for variable in _variables(callback))


def _variables(callback: Any) -> Iterator[str]:
    hints = get_type_hints(callback, include_extras=True)
    for name in inspect.signature(callback).parameters:
        hint = hints[name]
        if not hasattr(hint, "__metadata__"):  # Python 3.10 wraps it in Optional where the default is None
            hint = get_args(hint)[0]
        if hint.__metadata__[0].envvar:
            yield hint.__metadata__[0].envvar


def parse(words: Sequence[str]) -> str:
    """Read the arguments of one `dbpartition` command without running it; returns the command's name.

    Raises:
        Exception: Typer's own usage errors.
    """
    command: Any = typer.main.get_command(application())
    rest = list(words)
    path: list[str] = []
    with ExitStack() as stack:
        parent = None
        while hasattr(command, "commands"):
            name = rest.pop(0)
            if name not in command.commands:
                raise LookupError(f"there is no command dbpartition {' '.join([*path, name])}")
            parent = stack.enter_context(type(command).context_class(command, info_name=command.name, parent=parent))
            command = command.commands[name]
            path.append(name)
        stack.enter_context(command.make_context(path[-1], rest, parent=parent))
    return " ".join(path)
