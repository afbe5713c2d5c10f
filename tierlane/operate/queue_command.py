"""`tierlane queue` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, Yes, reads, writes
from tierlane.command import no_variable, run_group, verb_group

app = verb_group("Tier queues: list, pause, resume.")

TierName: TypeAlias = Annotated[str, typer.Argument(metavar="TIER", help="Name of the tier.")]


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "queue", argv)


@reads(app, "list")
def list_(
    pool: Annotated[str | None, no_variable("--pool", "Of this pool.", "all pools", metavar="NAME")] = None,
) -> Work:
    """Show how many wait in each tier's queue, how long the oldest has, and which are paused."""
    from tierlane.operate.queues import show_all

    return show_all(pool)


@writes(app, "pause")
def pause(tier: TierName, *, yes: Yes = False) -> Work:
    """Form no batches of a tier. Requests still enter, and wait until it is resumed or their time is up."""
    from tierlane.operate.queues import pause as work

    return work(tier, sure=yes)


@writes(app, "resume")
def resume(tier: TierName) -> Work:
    """Form batches of a tier again."""
    from tierlane.operate.queues import resume as work

    return work(tier)
