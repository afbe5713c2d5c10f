"""What every option of `tierlane chaos` means, as `--help` shows it."""

from tierlane.setting_text import Text, number
from tierlane.tool_command import Tool

OPTIONS: dict[str, Text] = {
    "seed": number("", "Seed of the load and of the faults; the same gives the same schedule. Unset: drawn, and told."),
    "seeds": Text(
        "",
        "Several seeds, such as 1-20 or 3,7-9: one run after the other, a row for each at the end, the whole table only "
        "of those that broke something. Unset: one run.",
        "SEEDS",
    ),
    "duration": Text("60", "Seconds of load; faults come in between, the first and last 3 s are quiet.", "SECONDS"),
    "rate": Text("300", "Requests a second over all tiers, sent on schedule whatever comes back (open loop).", "RATE"),
    "gateways": number("3", "Gateways, each on a port of its own."),
    "workers": number(
        "4", "Workers, each with a model that returns its inputs reversed, after 50 ms a batch, one in 8 after 300."
    ),
    "schedulers": number("2", "Schedulers."),
    "faults": Text("all", "Which faults, as names with commas between; `list` shows them.", "NAMES"),
    "tls": Text(
        "seed", "Whether the roles talk TLS to Redis: on, off, or seed: one seed in four, as it says itself.", "WHEN"
    ),
    "against": Text(
        "",
        "Stack file of a stack that is up: only faults that need no proxy. Its backend must be simulated. "
        "Unset: a stack of its own.",
        "FILE",
    ),
    "json": Text("", "Write the verdicts, the schedule and what happened to this file.", "FILE"),
    "keep": Text("", "Keep logs, history and evidence in this new directory. Unset: all is removed.", "DIR"),
}
SWITCHES = {"quiet": "Show nothing but the table of invariants."}
TOOL = Tool("chaos", OPTIONS, SWITCHES)
