"""`tierlane top`: its options."""

from typing import Annotated

import typer

from tierlane.command import (
    STYLE,
    Config,
    DataDir,
    Verb,
    VerbCommand,
    carry_out,
    from_variable,
    no_variable,
    with_example,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=STYLE)


@app.command(
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
        from tierlane.operate.top import watch  # noqa: PLC0415 - help must be fast

        return lambda settings: watch(settings, url, once=once)

    carry_out(prepare, config, database=False, data_dir=data_dir)
