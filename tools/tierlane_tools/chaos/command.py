"""The command `tierlane chaos` and its exit codes.

0: every invariant holds. 1: not so, or the stack could not be started. 2: wrong usage.
"""
# ruff: noqa: PLC0415 - imports for a run are late, so that help is fast

from typing import Any

import typer

from tierlane.command import FAILED, USAGE_ERROR, run_tool, with_example
from tierlane_tools.chaos.faults.catalogue import KINDS
from tierlane_tools.chaos.options import TOOL, ChaosUsageError, read_options

LIST = "list"
HELP = "Cause faults under load, and check all guarantees."
EPILOG = with_example(
    "chaos --seed 7 --duration 60\nchaos --faults list", "Exit codes: 0 every invariant holds, 1 not so, 2 wrong usage."
)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_tool(TOOL, _run, argv, says=HELP, epilog=EPILOG)


def _run(given: dict[str, Any]) -> int:
    if given["faults"] == LIST:
        typer.echo(fault_list())
        return 0
    from tierlane_local.embedded import EmbeddedServerError
    from tierlane_local.up.data_dir import StackError
    from tierlane_tools.chaos.run import run
    from tierlane_tools.chaos.series import run_series

    try:
        options = read_options(given, quiet=bool(given["quiet"]))
        return run_series(options) if options.seeds else run(options)
    except ChaosUsageError as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
    except (StackError, EmbeddedServerError) as error:
        typer.echo(f"cannot start: {error}", err=True)
        return FAILED


def fault_list() -> str:
    """Every fault with its description and the Redis that it needs; a star where an external stack can have it."""
    lines = [
        f"{kind.name:<18} {'*' if kind.outside else ' '} {kind.description}{f' ({kind.needs})' if kind.needs else ''}"
        for kind in KINDS
    ]
    return "\n".join([*lines, "* also with --against", "With --cluster, network faults are only those of PostgreSQL."])
