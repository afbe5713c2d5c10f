"""`make bench`: measures every published figure, each case on a new stack.

Prints a table, stores all figures in a JSON file, and writes docs/benchmarks.md from it; cases that are not run keep their
figures. Exit codes: 0 all targets of the run cases hold, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cases import (
    batch_lane,
    batching,
    capacity,
    cells,
    customers,
    depth,
    disk,
    duration,
    fairness,
    fairness_fleet,
    fairness_gateways,
    idle,
    memory,
    model,
    overload,
    peers,
    pools,
    programs,
    saturation,
    scaling,
    stream_events,
    streams,
    throughput,
    workers,
)
from cases.outcome import Outcome
from cases.page import write_page
from cases.report import holds, measured, show
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
CASES: Mapping[str, Callable[..., Outcome]] = {
    "throughput": throughput.run,
    "disk": disk.run,
    "idle": idle.run,
    "saturation": saturation.run,
    "overload": overload.run,
    "capacity": capacity.run,
    "depth": depth.run,
    "memory": memory.run,
    "customers": customers.run,
    "fairness": fairness.run,
    "fairness_gateways": fairness_gateways.run,
    "fairness_fleet": fairness_fleet.run,
    "batch_lane": batch_lane.run,
    "cells": cells.run,
    "workers": workers.run,
    "streams": streams.run,
    "stream_events": stream_events.run,
    "pools": pools.run,
    "model": model.run,
    "scaling": scaling.run,
    "duration": duration.run,
    "batching": batching.run,
    "peers": peers.run,
    "programs": programs.run,
}


def read_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Measure everything, write docs/benchmarks.md.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--skip", nargs="+", choices=CASES, default=[], metavar="CASE", help="cases to leave out")
    parser.add_argument("--quick", action="store_true", help="short runs; not for published figures")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks.json", help="the file of figures")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
    return parser.parse_args()


def main() -> int:
    """Run the suite; return the exit code."""
    arguments, console = read_arguments(), Console()
    kept = json.loads(arguments.json.read_text("utf-8")) if arguments.json.exists() else {}
    chosen = [name for name in CASES if name in arguments.only and name not in arguments.skip]
    for name in chosen:
        console.print(f"{name} ...")
        kept[name] = measured(CASES[name], quick=arguments.quick)
        # After each case, since the suite takes long and may be interrupted.
        arguments.json.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
        write_page(arguments.page, kept)
        show(console, name, kept[name])
    return 0 if all(holds(kept[name]) for name in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
