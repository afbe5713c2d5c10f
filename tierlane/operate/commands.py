"""`tierlane gpu`, `queue` and `top` as commands: their verbs and options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Work, Yes, reads, writes
from tierlane.command import STYLE, Config, DataDir, Verb, carry_out, from_variable, no_variable, run_group, verb_group

gpu_app = verb_group("GPUs and their workers: list, cordon, uncordon.")

Worker: TypeAlias = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `list` shows it.")]


def gpu_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(gpu_app, "gpu", argv)


@reads(gpu_app, "list")
def gpu_list(
    pool: Annotated[str | None, no_variable("--pool", "Of this pool.", "all pools", metavar="NAME")] = None,
) -> Work:
    """Show every worker that was heard of in the last five minutes, and those that are cordoned."""
    from tierlane.operate.gpus import show_all

    return show_all(pool)


@writes(gpu_app, "cordon")
def gpu_cordon(
    worker: Worker,
    *,
    reason: Annotated[str, no_variable("--reason", "Why, for whoever looks next.", metavar="TEXT")] = "",
    yes: Yes = False,
) -> Work:
    """Give a worker no new work until it is uncordoned. It finishes what it runs, and stays cordoned over restarts."""
    from tierlane.operate.gpus import cordon as work

    return work(worker, reason, sure=yes)


@writes(gpu_app, "uncordon")
def gpu_uncordon(worker: Worker) -> Work:
    """Let a worker claim again."""
    from tierlane.operate.gpus import uncordon as work

    return work(worker)


queue_app = verb_group("Tier queues: list, pause, resume.")

TierName: TypeAlias = Annotated[str, typer.Argument(metavar="TIER", help="Name of the tier.")]


def queue_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(queue_app, "queue", argv)


@reads(queue_app, "list")
def queue_list(
    pool: Annotated[str | None, no_variable("--pool", "Of this pool.", "all pools", metavar="NAME")] = None,
) -> Work:
    """Show how many wait in each tier's queue, how long the oldest has, and which are paused."""
    from tierlane.operate.queues import show_all

    return show_all(pool)


@writes(queue_app, "pause")
def queue_pause(tier: TierName, *, yes: Yes = False) -> Work:
    """Form no batches of a tier. Requests still enter, and wait until it is resumed or their time is up."""
    from tierlane.operate.queues import pause as work

    return work(tier, sure=yes)


@writes(queue_app, "resume")
def queue_resume(tier: TierName) -> Work:
    """Form batches of a tier again."""
    from tierlane.operate.queues import resume as work

    return work(tier)


top_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=STYLE
)


def top_main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(top_app, "top", argv)


@top_app.command(epilog="q or Ctrl-C ends it. Exit codes: 0 done, 1 no gateway answers (--once), 2 wrong usage.")
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
    once: Annotated[bool, no_variable("--once", "Print one frame and end.", "off where it is a terminal")] = False,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Watch a running system: status and reasons, tiers, pools, GPUs, once a second."""

    def prepare() -> Verb:
        from tierlane.operate.top import watch

        return lambda settings: watch(settings, url, once=once)

    carry_out(prepare, config, database=False, data_dir=data_dir)
