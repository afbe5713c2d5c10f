"""The command `tierlane explain`: its argument and options. The rest is imported when it runs."""
# ruff: noqa: PLC0415 - see above

from typing import Annotated, Literal

import typer

from tierlane.command import (
    EPILOG,
    STYLE,
    Config,
    DataDir,
    Pool,
    Verb,
    VerbCommand,
    carry_out,
    from_variable,
    output,
    run_group,
    with_example,
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # Plain help takes half the time.
    pretty_exceptions_enable=False,
)


EXAMPLE = "explain acme\nexplain req_01a1fe0124e5742f8c4b28b2a107510e"


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "explain", argv)


def _show_help(context: typer.Context, *, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# An own help option, because typer imports pydantic to check the built-in one.
@app.command(epilog=with_example(EXAMPLE, EPILOG), cls=VerbCommand, add_help_option=False, context_settings=STYLE)
def explain(
    *,
    name: Annotated[
        str, typer.Argument(metavar="CUSTOMER_OR_REQUEST", help="A customer's name or id, or a request id.")
    ],
    refusals: Annotated[
        int,
        from_variable(
            "--refusals",
            variable="TIERLANE_EXPLAIN_REFUSALS",
            says="Number of a customer's last rejections to show.",
            default="5",
            metavar="N",
            min=0,
            max=1000,
        ),
    ] = 5,
    form: Annotated[Literal["table", "json"], output("TIERLANE_EXPLAIN_OUTPUT")] = "table",
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
    help_: Annotated[  # noqa: ARG001 - its callback shows the help
        bool, typer.Option("--help", "-h", help="Show this message and exit.", callback=_show_help, is_eager=True)
    ] = False,
) -> None:
    """Show each limit of a customer, where it comes from and what is left; or what happened to a request."""

    def prepare() -> Verb:
        from tierlane.explain.answer import explain_name

        return lambda settings: explain_name(settings, name, refusals, form)

    carry_out(prepare, config, data_dir=data_dir, pool=pool)
