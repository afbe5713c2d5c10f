"""`tierlane top`: its options."""

from typing import Annotated

from tierlane.command import (
    Config,
    DataDir,
    Verb,
    VerbCommand,
    carry_out,
    gateway_url,
    option,
    single_verb,
    with_example,
)

app = single_verb()


@app.command(
    epilog=with_example(
        "top\ntop --once",
        "q or Ctrl-C ends it. Exit codes: 0 done, 1 no response from the gateway (--once), 2 wrong usage.",
    ),
    cls=VerbCommand,
)
def top(
    *,
    url: Annotated[str | None, gateway_url("TIERLANE_TOP_URL")] = None,
    once: Annotated[bool, option("--once", "Print one frame and exit.", "off in a terminal")] = False,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show a live view, updated each second: status and reasons, tiers, pools."""

    def prepare() -> Verb:
        from tierlane.operate.top import watch  # noqa: PLC0415 - help must be fast

        return lambda settings: watch(settings, url, once=once)

    carry_out(prepare, config, database=False, data_dir=data_dir)
