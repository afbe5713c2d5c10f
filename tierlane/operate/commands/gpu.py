"""`tierlane gpu`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, Yes, changes, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import pools
from tierlane.operate.commands.place import OfCell, OfPool

Worker: TypeAlias = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `list` shows it.")]

app = verb_group("GPUs and their workers: list, cordon, uncordon.", "gpu list")


@reads(app, "list", "gpu list")
def gpu_list(pool: OfPool = None, cell: OfCell = None) -> Work:
    """Show the workers seen in the last five minutes, and all cordoned workers."""
    return lambda call: pools.show_workers(call, pool, cell)


@writes(app, "cordon", "gpu cordon worker-1 --reason maintenance")
def gpu_cordon(
    worker: Worker,
    *,
    reason: Annotated[str, option("--reason", "The reason, shown in `list`.", metavar="TEXT")] = "",
    yes: Yes = False,
) -> Work:
    """Stop a worker from claiming batches until it is uncordoned, also after a restart. It finishes its running work."""
    return lambda call: pools.cordon(call, worker, reason, sure=yes)


@writes(app, "uncordon", "gpu uncordon worker-1")
def gpu_uncordon(worker: Worker) -> Work:
    """Let a worker claim batches again."""
    return changes(lambda connection: pools.uncordon(connection, worker))
