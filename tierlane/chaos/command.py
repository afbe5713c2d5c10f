"""`tierlane chaos` as a command: its exit codes.

0: every invariant held. 1: not so, or the stack could not be started. 2: wrong usage.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a run needs is imported when it runs

from typing import Any

import typer

from tierlane.chaos.option_texts import TOOL
from tierlane.tool_command import FAILED, USAGE_ERROR, run_tool

LIST = "list"
HELP = "Break a stack under load, and show whether anything was lost."
EPILOG = "Exit codes: 0 every invariant held, 1 not so, 2 wrong usage."


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_tool(TOOL, _run, argv, says=HELP, epilog=EPILOG)


def _run(given: dict[str, Any]) -> int:
    from tierlane.chaos.options import UsageError, fault_list, read_options

    if given["faults"] == LIST:
        typer.echo(fault_list())
        return 0
    from tierlane.chaos.run import run
    from tierlane.chaos.series import run_series
    from tierlane.embedded import EmbeddedServerError
    from tierlane.up.errors import StackError

    try:
        options = read_options(given, quiet=given["quiet"])
        return run_series(options) if options.seeds else run(options)
    except UsageError as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
    except (StackError, EmbeddedServerError) as error:
        typer.echo(f"cannot start: {error}", err=True)
        return FAILED
