"""The command `tierlane explain`: its argument and options. The rest is imported when it runs."""
# ruff: noqa: PLC0415 - see above

from typing import Annotated, Literal

import typer

from tierlane.command import (
    EPILOG,
    Config,
    DataDir,
    HelpOption,
    Pool,
    Verb,
    VerbCommand,
    carry_out,
    option,
    output,
    run_group,
    single_verb,
    with_example,
)

app = single_verb()


EXAMPLE = "explain acme\nexplain req_01a1fe0124e5742f8c4b28b2a107510e"


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "explain", argv)


# An own help option, because typer imports pydantic to check the built-in one.
@app.command(epilog=with_example(EXAMPLE, EPILOG), cls=VerbCommand, add_help_option=False)
def explain(
    *,
    name: Annotated[
        str, typer.Argument(metavar="CUSTOMER_OR_REQUEST", help="A customer's name or id, or a request id.")
    ],
    refusals: Annotated[
        int,
        option(
            "--refusals",
            "Number of a customer's last rejections to show.",
            "5",
            variable="TIERLANE_EXPLAIN_REFUSALS",
            metavar="N",
            min=0,
            max=1000,
        ),
    ] = 5,
    form: Annotated[Literal["table", "json"], output("TIERLANE_EXPLAIN_OUTPUT")] = "table",
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
    help_: HelpOption = False,  # noqa: ARG001 - its callback shows the help
) -> None:
    """Show each limit of a customer, where it comes from and what is left; or what happened to a request."""

    def prepare() -> Verb:
        from tierlane.explain.answer import explain_name

        return lambda settings: explain_name(settings, name, refusals, form)

    carry_out(prepare, config, data_dir=data_dir, pool=pool)
