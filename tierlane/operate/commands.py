"""`tierlane gpu` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, Yes, reads, writes
from tierlane.command import no_variable, run_group, verb_group

app = verb_group("GPUs and their workers: list, cordon, uncordon.")

Worker: TypeAlias = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `list` shows it.")]


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "gpu", argv)


@reads(app, "list")
def list_(
    pool: Annotated[str | None, no_variable("--pool", "Of this pool.", "all pools", metavar="NAME")] = None,
) -> Work:
    """Show every worker that was heard of in the last five minutes, and those that are cordoned."""
    from tierlane.operate.gpus import show_all

    return show_all(pool)


@writes(app, "cordon")
def cordon(
    worker: Worker,
    *,
    reason: Annotated[str, no_variable("--reason", "Why, for whoever looks next.", metavar="TEXT")] = "",
    yes: Yes = False,
) -> Work:
    """Give a worker no new work until it is uncordoned. It finishes what it runs, and stays cordoned over restarts."""
    from tierlane.operate.gpus import cordon as work

    return work(worker, reason, sure=yes)


@writes(app, "uncordon")
def uncordon(worker: Worker) -> Work:
    """Let a worker claim again."""
    from tierlane.operate.gpus import uncordon as work

    return work(worker)
