"""`make predictions`: `tierlane simulate` predicts the scenarios of `make peers`, which are then run on Tierlane.

    .venv/bin/python tools/bench/peers/predictions.py --quick
    .venv/bin/python tools/bench/peers/predictions.py --scenarios overload --json found.json

All predictions are written to the file of raw data before the first scenario runs. The scenario files are in
tools/bench/predictions/, and so are the raw data, from which the table in docs/simulate.md is written; with --quick, --scenarios or
--json, only the file of --json. Exit code 0: everything was run.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases.continuous_setup import Plan, run_side
from cases.page import machine
from cases.peer_scenarios import Scenario, scenarios
from cases.prediction_page import DATA, PAGE, section, updated
from cases.predictions import LoadFigures, measured, predict
from chat_load.generator import Span
from descendants import adopt_orphans
from engine.process import RunningEngine, running_engine
from rich.console import Console
from running import processes
from side_by_side import LIMIT_S, SETTLE_S, WARM_S, Member, changed, idle_after_s, tierlane

CONSOLE = Console(stderr=True, width=160)
SEED = 1
COST_SHARE, COST_SPAN, COST_QUICK = 0.3, Span(2.0, 15.0, 20.0), Span(1.0, 5.0, 10.0)
"""The load by which the time beyond queue and engine is measured, as a part of the capacity."""
SCENARIOS = tuple(each for each in scenarios(SEED) if each.name != "overhead")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = tuple(each.name for each in SCENARIOS)
    parser.add_argument("--quick", action="store_true", help="short runs; not for published figures")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--warm-seconds", type=float, default=4.0, help="uncounted, before each run")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for answers after an open loop")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="scenarios")
    parser.add_argument("--json", type=Path, help="write the raw data to this file, and no page")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.warm_seconds, arguments.drain_seconds = 8.0, 2.0, 10.0
    return arguments


class Comparison:
    """One run of the command. `target`: the file of raw data."""

    def __init__(self, arguments: argparse.Namespace, target: Path | None) -> None:
        self._arguments = arguments
        self._target = target
        self._wanted = [each for each in SCENARIOS if each.name in arguments.scenarios]
        self._plan = Plan(arguments.seconds, 1, arguments.warm_seconds)
        date, lengths = time.strftime("%Y-%m-%d", time.gmtime()), ("seconds", "warm_seconds", "drain_seconds")
        self.document: dict[str, Any] = {
            "date": date,
            "machine": machine(),
            **{name: getattr(arguments, name) for name in lengths},
        }

    def measure(self) -> None:
        """Predict all scenarios, then run them."""
        with self._started(1) as (member, engines):
            cost_ms = self.document["cost_ms"] = self._cost_ms(member, engines[0])
            self.document["scenarios"] = [self._predicted(scenario, cost_ms) for scenario in self._wanted]
            self._write()
            for scenario, found in zip(self._wanted, self.document["scenarios"], strict=True):
                if not scenario.kill:
                    self._run(scenario, found, member, engines)
        for scenario, found in zip(self._wanted, self.document["scenarios"], strict=True):
            if scenario.kill:
                with self._started(2) as (member, engines):
                    self._run(scenario, found, member, engines)

    @contextmanager
    def _started(self, count: int) -> Iterator[tuple[Member, list[RunningEngine]]]:
        """A stack that has learnt the capacity of its engines."""
        with processes(LIMIT_S) as (_, home), ExitStack() as exits:
            engines = [exits.enter_context(running_engine()) for _ in range(count)]
            member = tierlane(engines, self._plan, home, exits)
            closed = next(each for each in scenarios(0) if each.name == "closed")
            run_side(member.side, engines[0], member.loads(closed), Span(0.0, WARM_S), wait=False)
            idle_after_s(member, engines[0])
            yield member, engines

    def _cost_ms(self, member: Member, engine: RunningEngine) -> float:
        """How much later a first token comes than in an engine without anything before it, in the median."""
        span, mixed = COST_QUICK if self._arguments.quick else COST_SPAN, SCENARIOS[1]
        share = COST_SHARE / 0.7
        light = replace(mixed, loads=[replace(load, rate=share * load.rate, seed=SEED + 1) for load in mixed.loads])
        found = measured(run_side(member.side, engine, member.loads(light), span), light.loads, span.seconds)
        alone = predict(light, span, 0.0)
        pairs = [(each.first_p50_ms, alone[name].first_p50_ms) for name, each in found.items()]
        return round(max(0.0, sum((ran or 0.0) - (simulated or 0.0) for ran, simulated in pairs) / len(pairs)), 2)

    def _predicted(self, scenario: Scenario, cost_ms: float) -> dict[str, Any]:
        found = _plain(predict(scenario, self._span(scenario), cost_ms))
        CONSOLE.print(f"{time.strftime('%H:%M:%S')} {scenario.name}: predicted")
        return {"name": scenario.name, "title": scenario.title, "predicted_at": _now(), "predicted": found}

    def _span(self, scenario: Scenario) -> Span:
        arguments = self._arguments
        return scenario.span(arguments.warm_seconds, arguments.seconds, arguments.drain_seconds)

    def _run(self, scenario: Scenario, found: dict[str, Any], member: Member, engines: list[RunningEngine]) -> None:
        span, victim = self._span(scenario), engines[1] if scenario.kill else None
        time.sleep(SETTLE_S)
        found["run_at"] = _now()
        with changed(scenario, engines[0], victim, span):
            run = run_side(member.side, engines[0], member.loads(scenario), span, wait=False)
        found["run"] = _plain(measured(run, scenario.loads, span.seconds))
        found |= {name: run.figures[name] for name in ("machine_busy", "late_ms", "unanswered")}
        if victim is None:
            idle_after_s(member, engines[0])
        CONSOLE.print(f"{time.strftime('%H:%M:%S')} {scenario.name}: run")
        self._write()

    def _write(self) -> None:
        if self._target:
            self._target.write_text(json.dumps(self.document, indent=1) + "\n", "utf-8")


def _plain(found: Mapping[str, LoadFigures]) -> dict[str, Any]:
    return {
        name: {kind: round(value, 4) if isinstance(value, float) else value for kind, value in each._asdict().items()}
        for name, each in found.items()
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> int:
    """Measure; return the exit code."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Like an exception, so that all processes are stopped.
    adopt_orphans()
    is_part = arguments.quick or arguments.json or len(arguments.scenarios) < len(SCENARIOS)
    comparison = Comparison(arguments, arguments.json if is_part else DATA)
    comparison.measure()
    if not is_part:
        PAGE.write_text(updated(PAGE.read_text("utf-8"), comparison.document), "utf-8")
    sys.stdout.write(section(comparison.document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
