"""`make bench-continuous`: Tierlane before an engine with continuous batching, beside the engine alone.

    .venv/bin/python tools/bench/continuous.py --quick --only closed
    .venv/bin/python tools/bench/continuous.py --only closed --seconds 60 --rounds 3 --workers 1 --json closed.json

The engine is a stand-in (tools/bench/engine). Exit codes: 0 all targets of the run cases hold, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from cases import (
    continuous_changes,
    continuous_closed,
    continuous_inputs,
    continuous_open,
    continuous_tiers,
)
from cases.continuous_setup import QUICK, Plan
from cases.outcome import Outcome
from cases.report import holds, measured, show
from rich.console import Console

CASES: Mapping[str, Callable[..., Outcome]] = {
    "closed": continuous_closed.run,
    "changes": continuous_changes.run,
    "open": continuous_open.run,
    "tiers": continuous_tiers.run,
    "inputs": continuous_inputs.run,
}


def read_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="short runs; not for published figures")
    parser.add_argument("--seconds", type=float, help="of each run")
    parser.add_argument("--rounds", type=int, help="how often the sides take turns; medians are shown")
    parser.add_argument("--warm-seconds", type=float, help="uncounted, before each run")
    parser.add_argument("--gateways", type=int, help="of each stack")
    parser.add_argument("--workers", type=int, nargs="+", help="of the stacks of the case `closed`")
    parser.add_argument("--clients", type=int, nargs="+", help="of the case `closed`")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of each stack")
    parser.add_argument("--defaults", action="store_true", help="no other settings than those of --set")
    parser.add_argument("--json", type=Path, help="the file of figures; those of other cases are kept")
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan with the given options."""
    plan = QUICK if arguments.quick else Plan()
    settings = {} if arguments.defaults else dict(plan.settings)
    settings |= dict(pair.lower().split("=", 1) for pair in arguments.set)
    given = {
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "warm_s": arguments.warm_seconds,
        "gateways": arguments.gateways,
        "workers": arguments.workers,
        "clients": arguments.clients,
    }
    return replace(plan, settings=settings, **{name: value for name, value in given.items() if value is not None})


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the cases; return the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)  # So that the engine and the stack are stopped.
    arguments, console = read_arguments(), Console(width=160)
    file: Path | None = arguments.json
    kept = json.loads(file.read_text("utf-8")) if file is not None and file.exists() else {}
    found = {}
    for name in arguments.only:
        console.print(f"{name} ...")
        found[name] = measured(partial(CASES[name], plan=plan_of(arguments)), quick=arguments.quick)
        if file is not None:
            file.write_text(json.dumps(kept | found, indent=1, sort_keys=True) + "\n", "utf-8")
        show(console, name, found[name])
    return 0 if all(map(holds, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
