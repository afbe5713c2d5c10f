"""`tierlane cell`, `gpu`, `queue`, `dlq`, `batch`, `usage` and `top`: their verbs and options."""
# ruff: noqa: PLC0415 - help must be fast, so the code of `top` is imported when it runs

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from tierlane.admin.fields import CELL
from tierlane.admin.options import (
    PLACE,
    Actor,
    Given,
    Limit,
    Name,
    Work,
    Yes,
    add_verb,
    limit_option,
    read_options,
    reads,
    writes,
)
from tierlane.command import (
    STYLE,
    Config,
    DataDir,
    LazyModule,
    Pool,
    Verb,
    VerbCommand,
    carry_out,
    from_variable,
    no_variable,
    verb_group,
    with_example,
)

if TYPE_CHECKING:
    from tierlane.admin import values
    from tierlane.operate import batches, cells, dead_letters, pools, requeue, usage
else:
    values = LazyModule("tierlane.admin.values")
    batches = LazyModule("tierlane.operate.batches")
    cells = LazyModule("tierlane.operate.cells")
    dead_letters = LazyModule("tierlane.operate.dead_letters")
    pools = LazyModule("tierlane.operate.pools")
    requeue = LazyModule("tierlane.operate.requeue")
    usage = LazyModule("tierlane.operate.usage")

Worker: TypeAlias = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `list` shows it.")]
TierName: TypeAlias = Annotated[str, typer.Argument(metavar="TIER", help="Name of the tier.")]
OfPool: TypeAlias = Annotated[str | None, no_variable("--pool", "Only this pool.", "all pools", metavar="NAME")]

OfCell: TypeAlias = Annotated[str | None, no_variable("--cell", "Only this cell.", "all cells", metavar="NAME")]

cell_app = verb_group(
    "Cells: list, open, drain, close.", "cell open c2 --redis-url redis://redis-2.internal:6379/0\ncell list"
)


@reads(cell_app, "list", "cell list")
def cell_list() -> Work:
    """Show each cell with its server, the customers that name it, and what waits and runs there."""
    return cells.show_cells()


@writes(cell_app, "open", "cell open c2 --redis-url redis://redis-2.internal:6379/0 --weight 2", CELL, new=True)
def cell_open(
    name: Name,
    given: Given,
    *,
    force: Annotated[bool, no_variable("--force", "Also if its server cannot be used from here.", "off")] = False,
) -> Work:
    """Add a cell, or open it again. Its part of the customers moves there within a second."""
    return cells.open_(name, values.values_of(CELL, given), force=force)


@writes(cell_app, "drain", "cell drain c2")
def cell_drain(name: Name) -> Work:
    """Send no new requests to a cell: its customers move to the others. What it has ends there."""
    return cells.drain(name)


@writes(cell_app, "close", "cell close c2")
def cell_close(
    name: Name,
    *,
    force: Annotated[
        bool, no_variable("--force", "Also if it is open, not finished, or does not respond.", "off")
    ] = False,
) -> Work:
    """Stop serving a drained cell that is finished. Its server is not needed any more."""
    return cells.close(name, force=force)


gpu_app = verb_group("GPUs and their workers: list, cordon, uncordon.", "gpu list")


@reads(gpu_app, "list", "gpu list")
def gpu_list(pool: OfPool = None, cell: OfCell = None) -> Work:
    """Show the workers seen in the last five minutes, and all cordoned workers."""
    return pools.show_workers(pool, cell)


@writes(gpu_app, "cordon", "gpu cordon worker-1 --reason maintenance")
def gpu_cordon(
    worker: Worker,
    *,
    reason: Annotated[str, no_variable("--reason", "The reason, shown in `list`.", metavar="TEXT")] = "",
    yes: Yes = False,
) -> Work:
    """Stop a worker from claiming batches until it is uncordoned, also after a restart. It finishes its running work."""
    return pools.cordon(worker, reason, sure=yes)


@writes(gpu_app, "uncordon", "gpu uncordon worker-1")
def gpu_uncordon(worker: Worker) -> Work:
    """Let a worker claim batches again."""
    return pools.uncordon(worker)


queue_app = verb_group("Tier queues: list, pause, resume.", "queue list")


@reads(queue_app, "list", "queue list")
def queue_list(pool: OfPool = None, cell: OfCell = None) -> Work:
    """Show the depth of each tier's queue, the age of its oldest request, and whether it is paused."""
    return pools.show_queues(pool, cell)


@writes(queue_app, "pause", "queue pause free")
def queue_pause(tier: TierName, *, yes: Yes = False) -> Work:
    """Form no batches of a tier. Its requests are still accepted, and wait until it is resumed or they time out."""
    return pools.pause(tier, sure=yes)


@writes(queue_app, "resume", "queue resume free")
def queue_resume(tier: TierName) -> Work:
    """Form batches of a tier again."""
    return pools.resume(tier)


dlq_app = verb_group("Dead letters: requests that failed permanently. List, show, requeue, purge.", "dlq list")

_DLQ_READS = read_options("TIERLANE_DLQ_OUTPUT")
_DLQ_WRITES = {"actor": (Actor, None), **PLACE, "pool": (Pool, None)}


def dlq_list(
    *,
    limit: Annotated[int, limit_option("TIERLANE_DLQ_LIMIT", 20, 10_000)] = 20,
    customer: Annotated[str | None, no_variable("--customer", "Only of this customer, by name or id.")] = None,
    code: Annotated[str | None, no_variable("--code", "Only with this error code.")] = None,
) -> Work:
    """Show the newest dead letters, without their inputs."""
    return dead_letters.show_list(limit, customer, code)


def dlq_show(
    *,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id.")],
    body: Annotated[bool, no_variable("--body", "Also print the input of the customer.", "off")] = False,
) -> Work:
    """Show a dead letter."""
    return dead_letters.show_one(request_id, with_input=body)


def dlq_requeue(
    *,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Request ids.")],
    again: Annotated[bool, no_variable("--again", "Also dead letters that were requeued before.", "off")] = False,
    cell: Annotated[
        str | None, no_variable("--cell", "Run them there.", "the first with a healthy worker", metavar="NAME")
    ] = None,
) -> Work:
    """Run dead letters again under new ids, and show each result. Customers are not charged and get no response."""
    return requeue.requeue(ids, cell, again=again)


def dlq_purge(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Request ids.")] = None,
    older_than: Annotated[
        str | None,
        no_variable("--older-than", "All dead letters of at least this age, such as 12h or 7d.", metavar="AGE"),
    ] = None,
    all_: Annotated[bool, no_variable("--all", "All dead letters.", "off")] = False,
    yes: Yes = False,
) -> Work:
    """Delete dead letters and their inputs permanently."""
    return dead_letters.purge(dead_letters.Selection.of(ids or [], older_than, everything=all_), sure=yes)


add_verb(dlq_app, "list", dlq_list, _DLQ_READS, "dlq list --customer acme --code worker_lost")
add_verb(dlq_app, "show", dlq_show, _DLQ_READS, "dlq show req_01a1fe0124e5742f8c4b28b2a107510e")
add_verb(dlq_app, "requeue", dlq_requeue, _DLQ_WRITES, "dlq requeue req_01a1fe0124e5742f8c4b28b2a107510e")
add_verb(dlq_app, "purge", dlq_purge, _DLQ_WRITES, "dlq purge --older-than 30d")

batch_app = verb_group("Batches of /v1/batches: list, show, cancel.", "batch list")
BatchId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.")]


@reads(batch_app, "list", "batch list --customer acme --open")
def batch_list(
    *,
    limit: Limit = 100,
    customer: Annotated[str | None, no_variable("--customer", "Only of this customer, by name or id.")] = None,
    open_: Annotated[bool, no_variable("--open", "Only batches that have not ended.", "off")] = False,
) -> Work:
    """Show the newest batches, with the numbers of their lines."""
    return batches.show_list(limit, customer, open_only=open_)


@reads(batch_app, "show", "batch show batch_01a1fe0124e5742f8c4b28b2a107510e")
def batch_show(batch_id: BatchId) -> Work:
    """Show a batch, with its times and files."""
    return batches.show_one(batch_id)


@reads(batch_app, "cancel", "batch cancel batch_01a1fe0124e5742f8c4b28b2a107510e")
def batch_cancel(batch_id: BatchId) -> Work:
    """Cancel a batch. Its customer can read the results of lines that have ended."""
    return batches.cancel(batch_id)


usage_app = verb_group("Usage of customers: export.", "usage export --from 2026-11-01 --to 2026-11-30")


def usage_export(
    *,
    first: Annotated[str, no_variable("--from", "First day, in UTC.", "required", metavar="YYYY-MM-DD")],
    last: Annotated[str, no_variable("--to", "Last day, in UTC; it is included.", "required", metavar="YYYY-MM-DD")],
    by: Annotated[
        Literal["day", "total"], no_variable("--by", "Lines for each day, or for the whole time.", "day")
    ] = "day",
) -> Work:
    """Export requests, tokens, GPU seconds and cost by customer, key and model, from the audit and the table prices."""
    return usage.export(first, last, daily=by == "day")


_USAGE_OUTPUT = from_variable("--output", "-o", variable="TIERLANE_USAGE_OUTPUT", says="Output format.", default="csv")
add_verb(
    usage_app,
    "export",
    usage_export,
    {"output": (Annotated[Literal["csv", "json"], _USAGE_OUTPUT], "csv"), **PLACE},
    "usage export --from 2026-11-01 --to 2026-11-30 --by total",
)

top_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=STYLE
)


@top_app.command(
    epilog=with_example(
        "top\ntop --once",
        "q or Ctrl-C ends it. Exit codes: 0 done, 1 no response from the gateway (--once), 2 wrong usage.",
    ),
    cls=VerbCommand,
)
def top(
    *,
    url: Annotated[
        str | None,
        from_variable(
            "--url",
            variable="TIERLANE_TOP_URL",
            says="Address of a gateway; needs TIERLANE_SERVICE_TOKEN.",
            default="the local stack's",
            metavar="URL",
        ),
    ] = None,
    once: Annotated[bool, no_variable("--once", "Print one frame and exit.", "off in a terminal")] = False,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show a live view, updated each second: status and reasons, tiers, pools."""

    def prepare() -> Verb:
        from tierlane.operate.top import watch

        return lambda settings: watch(settings, url, once=once)

    carry_out(prepare, config, database=False, data_dir=data_dir)
