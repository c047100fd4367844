"""The command line, `dbpartition`. Exit codes: 0 well, 1 error, 2 usage, 3 work failed."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from airflow_dbpartition.cli.options import OwnProcess, UsageError
from airflow_dbpartition.errors import DbPartitionError

# typer has brought its own copy of click since 0.20 or so, and gives neither class a public name.
_TyperUsageError: type[Exception] = typer.BadParameter.__mro__[1]
_TyperError: type[Exception] = typer.BadParameter.__mro__[2]

_MODULES = ("database", "working", "looking", "acting", "demo")


def _show_version(wanted: bool) -> None:
    if wanted:
        from airflow_dbpartition.worker.node import package_version

        typer.echo(f"dbpartition {package_version()}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Partitioned jobs coordinated by a relational database."""


def application(modules: Sequence[str] = _MODULES) -> typer.Typer:
    """The commands of these modules."""
    app = typer.Typer(
        name="dbpartition",
        help="Partitioned jobs coordinated by a relational database.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in modules:
        importlib.import_module(f"{__name__}.{name}").add_to(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors are one line on stderr, a traceback only with -v / --verbose."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a key that the terminal cannot show is no error
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(word in ("-v", "--verbose") for word in words)
    words = [word for word in words if word not in ("-v", "--verbose")]
    # A worker starts twice, the second time without typer: what other commands need is not imported for it as well.
    app = application(["working"] if words[:1] == ["worker"] else _MODULES)
    try:
        ours = OwnProcess(verbose) if arguments is None else None
        code = app(words, standalone_mode=False, prog_name="dbpartition", obj=ours)
    except _TyperError as error:
        code = _refuse(error)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except DbPartitionError as error:
        if verbose:
            traceback.print_exc()
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        code = 2 if isinstance(error, UsageError) else 1
    except (BrokenPipeError, SystemExit):  # `dbpartition jobs | head`; typer may make an exit of it
        # What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Any) -> int:
    """Say in one line what typer did not understand; a group without a command shows its help instead."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message)
        return 2
    refused: list[dict[str, Any]] = getattr(
        error.__cause__, "errors", list
    )()  # pydantic's, of which newer typers leave out the value
    message += f", got {refused[0]['input']!r}" if refused else ""
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "dbpartition"
    typer.echo(f"error: {' '.join(message.split())} (see `{where} --help`)", err=True)
    return 2 if isinstance(error, _TyperUsageError) else int(error.exit_code)
