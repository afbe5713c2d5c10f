"""`tierlane queue`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, Yes, reads, writes
from tierlane.command import verb_group
from tierlane.lazy import pools
from tierlane.operate.commands.place import OfCell, OfPool

TierName: TypeAlias = Annotated[str, typer.Argument(metavar="TIER", help="Name of the tier.")]

app = verb_group("Tier queues: list, pause, resume.", "queue list")


@reads(app, "list", "queue list")
def queue_list(pool: OfPool = None, cell: OfCell = None) -> Work:
    """Show the depth of each tier's queue, the age of its oldest request, and whether it is paused."""
    return lambda call: pools.show_queues(call, pool, cell)


@writes(app, "pause", "queue pause free")
def queue_pause(tier: TierName, *, yes: Yes = False) -> Work:
    """Form no batches of a tier. Its requests are still accepted, and wait until it is resumed or they time out."""
    return lambda call: pools.pause(call, tier, sure=yes)


@writes(app, "resume", "queue resume free")
def queue_resume(tier: TierName) -> Work:
    """Form batches of a tier again."""
    return lambda call: pools.resume(call, tier)
