"""`tierlane bench` as a command: its exit codes.

0: every request was answered and every objective met. 1: not so. 2: wrong usage.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a run needs is imported when it runs

from typing import Any

import typer

from tierlane.bench.option_texts import TOOL
from tierlane.tool_command import USAGE_ERROR, run_tool

HELP = "Load a gateway over all tiers, show what came back."
EPILOG = "Exit codes: 0 all answered and all objectives met, 1 not so, 2 wrong usage."


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_tool(TOOL, _run, argv, says=HELP, epilog=EPILOG)


def _run(given: dict[str, Any]) -> int:
    from tierlane.bench.plan import UsageError, read_plan
    from tierlane.bench.run import run
    from tierlane.bench.stack_info import StackError

    try:
        return run(read_plan(given))
    except (UsageError, StackError) as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
