"""`tierlane check` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, Literal

import typer

from tierlane.admin.options import Actor
from tierlane.command import (
    Config,
    DataDir,
    Verb,
    VerbCommand,
    carry_out,
    gateway_url,
    option,
    output,
    run_group,
    setting,
    single_verb,
    verb_group,
    with_example,
)

SIZES = "1,2,4,8,16,32,64"

app = verb_group("Checks before traffic finds out: a tick or a cross each, and what to do.", "check")
whole = single_verb()
"""Without a verb; not the group's own callback, whose options typer would import pydantic for, for any verb."""


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app if argv[:1] == ["model"] else whole, "check", argv)


@whole.command(
    epilog=with_example(
        "check\ncheck model tiny",
        "`tierlane check model --help`: whether a model does what a worker needs. Exit codes: 0 all passed, 1 a check failed, "
        "2 wrong usage.",
    ),
    cls=VerbCommand,
)
def system(
    *,
    url: Annotated[str | None, gateway_url("TIERLANE_CHECK_URL")] = None,
    form: Annotated[Literal["table", "json"], output("TIERLANE_CHECK_OUTPUT")] = "table",
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Look at all that a system stands on: servers, catalog, workers, a gateway. A tick, a warning or a cross each."""

    def prepare() -> Verb:
        from tierlane.check.system import check_system

        return lambda settings: check_system(settings, url, form)

    carry_out(prepare, config, data_dir=data_dir)


@app.command(epilog=with_example("check model tiny\ncheck model shout:shout --write shout"), cls=VerbCommand)
def model(
    *,
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="The model, as --backend of a worker names it.")],
    device: Annotated[str | None, setting("device")] = None,
    torch_threads: Annotated[str | None, setting("torch_threads")] = None,
    gpu_timeout_ms: Annotated[str | None, setting("gpu_timeout_ms")] = None,
    total_request_ms: Annotated[str | None, setting("total_request_ms")] = None,
    batch_sizes: Annotated[
        str, option("--batch-sizes", "Sizes to time.", SIZES, variable="TIERLANE_CHECK_BATCH_SIZES", metavar="N,N,...")
    ] = SIZES,
    max_tokens: Annotated[
        int,
        option(
            "--max-tokens",
            "Tokens that a model which generates may write for each input.",
            "16",
            variable="TIERLANE_CHECK_MAX_TOKENS",
            metavar="N",
            min=1,
            max=100_000,
        ),
    ] = 16,
    task: Annotated[
        Literal["complete", "embed"], option("--task", "What to ask the model for.", "complete")
    ] = "complete",
    input_: Annotated[
        str | None, option("--input", "A typical input, to be timed.", "five short texts", metavar="TEXT")
    ] = None,
    poison: Annotated[
        str | None, option("--poison", "An input that the model raises on, to be seen failing alone.", metavar="TEXT")
    ] = None,
    write: Annotated[
        str | None, option("--write", "Put what is suggested into the row of this model.", metavar="NAME")
    ] = None,
    form: Annotated[Literal["table", "json"], output("TIERLANE_CHECK_OUTPUT")] = "table",
    actor: Actor = None,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Load a model as a worker does, hold it to its contract, time its batches, suggest its settings.

    By default a batch may take 3 s and a request 4 s; a model that cannot meet this fails the check.
    """

    def prepare() -> Verb:
        from tierlane.check.model import ModelCheckOptions, check_model, sizes_of

        wishes = ModelCheckOptions(spec, sizes_of(batch_sizes), max_tokens, task, input_, poison, write)
        return lambda settings: check_model(settings, wishes, form, actor)

    given = {
        "device": device,
        "torch_threads": torch_threads,
        "gpu_timeout_ms": gpu_timeout_ms,
        "total_request_ms": total_request_ms,
    }
    carry_out(prepare, config, database=write is not None, data_dir=data_dir, **given)
