"""The options of `tierlane bench` and `tierlane simulate` that choose a trace and change it, as `--help` shows them."""

from tierlane.settings.declaration import Option

MOST_TOKENS = 10_000_000
BY = ("model", "kind", "tier", "customer")
"""Fields of a request by which `--trace-by` chooses its tier; `kind` is the log type of BurstGPT."""

MIX = "enterprise=0.3,paid=0.6,free=0.1"
"""The default of `--mix`."""

OPTIONS: dict[str, Option] = {
    "trace": Option("", "Replay the requests of this file; docs/traces.md has the formats.", "FILE"),
    "trace_format": Option("auto", "Its format, as in docs/traces.md; auto: by its first line.", "NAME"),
    "trace_from": Option("", "Leave out what is earlier, in seconds since the first line of the file.", "SECONDS"),
    "trace_to": Option("", "Leave out what is at or after this second since the first line of the file.", "SECONDS"),
    "trace_speed": Option("1", "Replay so many times as fast.", "FACTOR", 0, 1_000_000),
    "trace_spread": Option(
        "0",
        "Add a random part of so many seconds of the file to each time, for files with coarse times.",
        "SECONDS",
        0,
        86_400,
    ),
    "trace_rate": Option(
        "",
        "Mean requests a second: sessions are left out at random, or sent several times. Unset: the trace's.",
        "RATE",
    ),
    "trace_by": Option(
        "",
        f"Tiers by a field ({', '.join(BY)}), such as model:GPT-4=paid,ChatGPT=free. Others: by --mix, a session in one tier.",
        "RULE",
    ),
    "max_input_tokens": Option("", "Shorten longer prompts to so many tokens.", "N", 1, MOST_TOKENS),
    "max_output_tokens": Option("", "Shorten longer answers to so many tokens.", "N", 1, MOST_TOKENS),
}
