"""The command line, `dbpartition`. Exit codes: 0 well, 1 error, 2 usage, 3 work failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import click
import typer

from airflow_dbpartition.cli import acting, database, demo, looking, working
from airflow_dbpartition.errors import DbPartitionError

app = typer.Typer(
    name="dbpartition",
    help="Partitioned jobs coordinated by a relational database.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (database, working, looking, acting, demo):
    module.add_to(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; errors are one line on stderr, a traceback only with -v / --verbose."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = any(word in ("-v", "--verbose") for word in words)
    words = [word for word in words if word not in ("-v", "--verbose")]
    try:
        code = app(words, standalone_mode=False, prog_name="dbpartition")
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = 2
    except click.UsageError as error:
        error.show()
        code = 2
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except DbPartitionError as error:
        if verbose:
            traceback.print_exc()
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        code = 1
    except BrokenPipeError:  # `dbpartition jobs | head`
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
