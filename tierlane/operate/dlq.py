"""`tierlane dlq` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated, Literal, TypeAlias

import typer

from tierlane.admin.options import Actor
from tierlane.command import (
    Config,
    DataDir,
    Pool,
    Verb,
    carry_out,
    from_variable,
    no_variable,
    output,
    run_group,
    verb_group,
)

app = verb_group("Dead letters: requests that were given up. List, show, requeue, purge.")

Output: TypeAlias = Annotated[Literal["table", "json"], output("TIERLANE_DLQ_OUTPUT")]
Ids: TypeAlias = Annotated[list[str], typer.Argument(metavar="ID", help="Request ids.")]


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "dlq", argv)


@app.command("list")
def list_(
    *,
    limit: Annotated[
        int,
        from_variable(
            "--limit",
            variable="TIERLANE_DLQ_LIMIT",
            says="Most to show.",
            default="20",
            metavar="N",
            min=1,
            max=10_000,
        ),
    ] = 20,
    customer: Annotated[str | None, no_variable("--customer", "Of this customer, by name or id.")] = None,
    code: Annotated[str | None, no_variable("--code", "With this error code.")] = None,
    output: Output = "table",
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show the newest, without their inputs."""

    def prepare() -> Verb:
        from tierlane.operate.dead_letters import show_list

        return lambda settings: show_list(settings, limit, customer, code, output)

    carry_out(prepare, config, data_dir=data_dir)


@app.command()
def show(
    *,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id.")],
    body: Annotated[bool, no_variable("--body", "Print the customer's input, too.", "off")] = False,
    output: Output = "table",
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show all that is known of one."""

    def prepare() -> Verb:
        from tierlane.operate.dead_letters import show_one

        return lambda settings: show_one(settings, request_id, output, with_input=body)

    carry_out(prepare, config, data_dir=data_dir)


@app.command()
def requeue(
    *,
    ids: Ids,
    again: Annotated[bool, no_variable("--again", "Also what was requeued before.", "off")] = False,
    actor: Actor = None,
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
) -> None:
    """Run them again now under new ids, and say how each ended. Their customers are not charged, nor answered."""

    def prepare() -> Verb:
        from tierlane.operate.requeue import requeue_all

        return lambda settings: requeue_all(settings, ids, again=again, actor=actor)

    carry_out(prepare, config, data_dir=data_dir, pool=pool)


@app.command()
def purge(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Request ids.")] = None,
    older_than: Annotated[
        str | None, no_variable("--older-than", "All that died longer ago, such as 12h or 7d.", metavar="AGE")
    ] = None,
    all_: Annotated[bool, no_variable("--all", "All of them.", "off")] = False,
    yes: Annotated[bool, no_variable("--yes", "Do not ask.", "off")] = False,
    actor: Actor = None,
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
) -> None:
    """Delete them for good, inputs included."""

    def prepare() -> Verb:
        from tierlane.operate.purge import Selection, purge_selected

        selection = Selection.of(ids or [], older_than, everything=all_)
        return lambda settings: purge_selected(settings, selection, sure=yes, actor=actor)

    carry_out(prepare, config, data_dir=data_dir, pool=pool)
