"""Tierlane before real engines, beside each engine alone: clients in a closed loop, by turns.

    make engines ARGS=--collect-only                        # install them
    .venv/bin/python tools/bench/engines.py --only llama_cpp --seconds 20 --rounds 3

The model is small and random (tools/bench/real_engines); engine, stack and clients share the processors of this machine, so the
figures show the difference between both sides, not the speed of an engine. llama.cpp closes the connection after each stream
although it announces that it stays open, so some requests to it alone are lost. Exit codes: 0 all other answers were right,
1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases.continuous_setup import LONG_WAITS, SETTINGS, Side, medians
from cases.stack import CUSTOMERS_AS_TIERS, RAISED, started
from chat_load.connection import BROKEN
from chat_load.figures import answers_ended_in, latencies
from chat_load.generator import Span, run_loads
from chat_load.plan import Load
from real_engines.processes import ENGINES, MODEL, RunningEngine, running_engine
from rich.console import Console
from rich.table import Table

WARM_S = 4.0
LOST = f"0 {BROKEN}"
COLUMNS = ("tokens/s", "p50 ms", "first p50 ms", "first p99 ms", "refused", "errors")


def read_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="how often the sides take turns; medians are shown")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--slots", type=int, default=8, help="sequences that the engine runs at a time")
    return parser.parse_args()


@contextmanager
def sides(engine: RunningEngine) -> Iterator[list[Side]]:
    """The engine alone, and a stack before it whose limits are raised."""
    with started(workers=1, backend=engine.backend, **SETTINGS) as stack:
        stack.sql(RAISED, CUSTOMERS_AS_TIERS, LONG_WAITS)
        yield [
            Side("alone", engine.api, ""),
            Side("tierlane", f"{stack.info.http_url}/v1", stack.info.keys["paid"]),
        ]


def run_side(side: Side, load: Load, seconds: float) -> dict[str, Any]:
    """Figures of one run."""
    ran = run_loads(side.url, MODEL, [Load(**{**vars(load), "key": side.key})], Span(WARM_S, seconds))
    answers = answers_ended_in(ran)
    tokens = sum(answer.chat.tokens for answer in answers if answer.ok)
    return latencies(answers) | {"tokens_per_s": tokens / seconds}


def measure(engine: RunningEngine, arguments: argparse.Namespace) -> list[tuple[str, Mapping[str, Any]]]:
    """A row for each number of clients, form and side: the medians of its rounds."""
    rows = []
    with sides(engine) as both:
        for clients in arguments.clients:
            for stream in (False, True):
                runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in both}
                for turn in range(arguments.rounds):
                    load = Load(clients=clients, stream=stream, seed=turn + 1, exact=False)
                    for side in both:
                        runs[side.name].append(run_side(side, load, arguments.seconds))
                form = "streams" if stream else "chats"
                rows += [(f"{clients} clients, {form}: {name}", medians(each)) for name, each in runs.items()]
    return rows


def shown(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """The table of an engine."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", *COLUMNS):
        table.add_column(column, justify="left" if not column else "right")
    for name, found in rows:
        times = (found["p50_ms"], found["first_p50_ms"], found["first_p99_ms"])
        cells = [f"{found['tokens_per_s']:,.0f}", *("" if each is None else f"{each:,.0f}" for each in times)]
        table.add_row(name, *cells, str(sum(found["refused"].values())), str(found["errors"] or 0))
    return table


def main() -> int:
    """Measure the engines; return the exit code."""
    arguments, console, wrong = read_arguments(), Console(width=140), 0
    for name in arguments.only:
        with (
            tempfile.TemporaryDirectory(prefix="tierlane-engine-") as home,
            running_engine(ENGINES[name], Path(home), arguments.slots) as engine,
        ):
            rows = measure(engine, arguments)
        console.print(shown(f"{name}, {arguments.slots} sequences", rows))
        wrong += sum(number for _, found in rows for code, number in found["errors"].items() if code != LOST)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
