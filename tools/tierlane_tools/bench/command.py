"""`tierlane bench` as a command: what its options mean, as `--help` shows them, and its exit codes.

0: every request was answered and every objective met. 1: not so. 2: wrong usage.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a run needs is imported when it runs

from typing import Any

import typer

from tierlane.command import USAGE_ERROR, Tool, run_tool, with_example
from tierlane.settings.declaration import Option
from tierlane_tools.traces.options import MIX
from tierlane_tools.traces.options import OPTIONS as TRACE_OPTIONS

MIN_INPUT_BYTES = 15  # The nonce, NONCE_CHARACTERS long, and one more character.
MAX_INPUT_BYTES = 1 << 20
MAX_CONNECTIONS = 20_000
MAX_RATE = 1_000_000
MAX_SECONDS = 86_400
MAX_SEED = 2**63

OPTIONS: dict[str, Option] = {
    "url": Option("", "Where to send, as http://HOST:PORT. Unset: http_url of the stack file.", "URL"),
    "stack": Option(
        ".tierlane/stack.json",
        "Stack file of `tierlane up`: keys by tier, processes for CPU, database for the audit check.",
        "FILE",
    ),
    "mode": Option(
        "open",
        "open: --rate requests a second on schedule, whatever comes back. closed: each of --connections sends its next "
        "request when the last one is answered, which finds how much the system can do.",
        "KIND",
    ),
    "rate": Option("1000", "Requests a second over all tiers, in the open loop.", "RATE", 0, MAX_RATE),
    "duration": Option(
        "60", "Seconds that are measured. With --trace, unset: to the end of the trace.", "SECONDS", 0, MAX_SECONDS
    ),
    "warmup": Option("3", "Seconds of the same load before, not measured.", "SECONDS", 0, MAX_SECONDS),
    "mix": Option(MIX, "Share of each tier; each needs a key.", "MIX"),
    "keys": Option(
        "",
        "Keys to send with, a line `TIER,KEY` for each customer; those of a tier take turns. Unset: the stack file's.",
        "FILE",
    ),
    "arrivals": Option("poisson", "poisson (independent users, bursts included) or constant (equal gaps).", "KIND"),
    "input_bytes": Option(
        "32",
        "Size of each input in bytes, at least 15; each begins with a number of its own.",
        "N",
        MIN_INPUT_BYTES,
        MAX_INPUT_BYTES,
    ),
    "input": Option("", "Text of each input, after the number of its own. Wins over --input-bytes."),
    "model": Option("", "Model to name in each request. Unset: the gateway's default; with --trace: its first one."),
    "connections": Option(
        "128",
        "Keep-alive connections at most. When all are busy, waiting counts as latency. Closed loop: so many. With --trace, unset: 4096.",
        "N",
        1,
        MAX_CONNECTIONS,
    ),
    "timeout": Option(
        "10",
        "Seconds from its scheduled time after which a request counts as unanswered. With --trace, unset: 600.",
        "SECONDS",
        0,
        MAX_SECONDS,
    ),
    "verify": Option(
        "auto", "reversed (outputs must be the inputs reversed), off, or auto: reversed if the first ones are.", "KIND"
    ),
    "audit_wait": Option("15", "Seconds to wait at the end for the audit rows.", "SECONDS", 0, MAX_SECONDS),
    "seed": Option("", "Seed of the schedule. Unset: drawn, and told in the report.", "N", 0, MAX_SEED),
    "slo": Option(
        "",
        "Objectives that fail the run, such as enterprise.p99=250ms,enterprise.success=99.9%. Tier `all` is the sum.",
        "LIST",
    ),
    "max_error_rate": Option("", "Largest share of requests without a 200, such as 1%; more fails the run.", "SHARE"),
    "echo": Option(
        "auto",
        "on: before the run, the same load on a bare aiohttp echo of as many processes as there are gateways, to tell "
        "what a request costs beside it. off, or auto: on if the stack file names gateways.",
        "KIND",
    ),
    **TRACE_OPTIONS,
    "trace_api": Option(
        "chat", "chat or completions, both as streams: the endpoint for the requests of a trace.", "KIND"
    ),
    "token_bytes": Option(
        "4", "Bytes of prompt text for a token of a trace: 4 for the usual tokenizers, 1 for `tiny`.", "N", 1, 16
    ),
    "ignore_eos": Option("", "Ask for answers of exactly the trace's lengths; engines such as vLLM can.", switch=True),
    "json": Option("", "Write everything that was measured to this file.", "FILE"),
}
TOOL = Tool("bench", OPTIONS)


HELP = "Load a gateway with requests of all tiers, and report responses, latencies, and the audit."
EPILOG = with_example(
    "bench --rate 500 --duration 20\nbench --mode closed --slo paid.p99=250ms --json result.json\n"
    "bench --trace trace.csv --trace-rate 5 --ignore-eos",
    "Exit codes: 0 all answered and all objectives met, 1 not so, 2 wrong usage.",
)


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_tool(TOOL, _run, argv, says=HELP, epilog=EPILOG)


def _run(given: dict[str, Any]) -> int:
    from tierlane_local.stack_file import StackFileError
    from tierlane_tools.bench.plan.plan import BenchUsageError, read_plan
    from tierlane_tools.bench.run import run
    from tierlane_tools.traces.request import TraceError

    try:
        return run(read_plan(given))
    except (BenchUsageError, StackFileError, TraceError) as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
