"""`tierlane top` as a command: its options. What it does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from typing import Annotated

import typer

from tierlane.command import STYLE, Config, DataDir, Verb, carry_out, from_variable, no_variable, run_group

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=STYLE)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "top", argv)


@app.command(epilog="q or Ctrl-C ends it. Exit codes: 0 done, 1 no gateway answers (--once), 2 wrong usage.")
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
