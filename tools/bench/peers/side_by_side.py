"""`make peers`: gateways before the same engine with continuous batching, by turns, in the same scenarios.

    .venv/bin/python tools/bench/peers/side_by_side.py --quick
    .venv/bin/python tools/bench/peers/side_by_side.py --only smg_floors tierlane --scenarios overload --json found.json

Installs each gateway in a virtual environment of its own. The raw data are written to results/gateways.json in this folder, and
docs/peers.md from them; with --quick, --only, --scenarios or --json, only the file of --json. A gateway that cannot be installed or does not
start has a row with the reason. Exit codes: 0 every gateway has figures, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from cases.continuous_setup import (
    MODEL,
    QUICK,
    SELL_EVERYTHING,
    Plan,
    Side,
    direct,
    in_thread,
    run_side,
    stack_before,
    through,
    wait_until_idle,
)
from cases.continuous_tiers import CUSTOMERS, KEYS, TIERS_RAISED, wait_for_key
from cases.page import machine
from cases.peer_page import DATA, PAGE, render
from cases.peer_scenarios import SLOW_FACTOR, SLOW_S, Scenario, figures, scenarios
from cases.stack import Stack
from catalogue import InstallError, Place, prepare
from chat_load.generator import Span
from chat_load.plan import Load
from descendants import adopt_orphans
from engine.process import RunningEngine, running_engine
from gateways import GATEWAYS, NO_GATEWAY, TIERLANE, Gateway, cpu_of, start
from rich.console import Console
from running import StartError, processes

from tierlane_local.up.data_dir import StackError

CONSOLE = Console(stderr=True, width=160)
NAMES = ("direct", "tierlane", *(gateway.name for gateway in GATEWAYS))
SCENARIOS = tuple(scenario.name for scenario in scenarios(1))
FAULTS = (InstallError, StartError, StackError, RuntimeError, OSError, psutil.Error)
LIMIT_S = 4 * 3600
MOST_CHARACTERS = 200
"""Of the reason for missing figures, from its end."""
IDLE_S, LONGEST_IDLE_S = 15.0, 60.0
"""In which the engine is idle after all clients left: before a gateway is started again, and where it cannot be."""
STAYS_IDLE_S = 3.0
"""In which it then gets no requests."""
SETTLE_S = 1.0
"""Between two turns, and for a second worker to be seen."""
WARM_S = 6.0
"""Of the first load, from which a gateway can learn what the engine takes."""


class Member(NamedTuple):
    """A started gateway, or none. `keys` of the requests of a load, by its name; others have the key of the side. `start_again`:
    where that is possible.
    """

    side: Side
    keys: Mapping[str, str] = {}
    gateway: Gateway | None = None
    start_again: Callable[[], None] | None = None

    def loads(self, scenario: Scenario) -> list[Load]:
        """The loads of a scenario as this gateway gets them."""
        headers = self.gateway.headers if self.gateway else lambda _: ""
        return [replace(load, key=self.keys.get(load.name, ""), headers=headers(load.name)) for load in scenario.loads]


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs; not for published figures")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--warm-seconds", type=float, default=QUICK.warm_s, help="uncounted, before each run")
    parser.add_argument("--drain-seconds", type=float, default=15.0, help="for answers after an open loop")
    parser.add_argument("--rounds", type=int, default=3, help="how often the gateways take turns; medians are shown")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="gateways")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="scenarios")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), help="folder of virtual environments")
    parser.add_argument("--port", type=int, default=18600, help="the first of twenty that must be free")
    parser.add_argument("--install-only", action="store_true", help="make the virtual environments, measure nothing")
    parser.add_argument("--json", type=Path, help="write the raw data to this file, and no page")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.warm_seconds, arguments.drain_seconds, arguments.rounds = 6.0, 2.0, 4.0, 1
    return arguments


class Comparison:
    """One run of the command; `failed` has the reason for each gateway without figures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.plan = Plan(arguments.seconds, arguments.rounds, arguments.warm_seconds)
        self.failed: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self._pythons: dict[str, Path] = {}

    def install(self) -> None:
        """Make the virtual environments."""
        for gateway in GATEWAYS:
            if gateway.name in self.arguments.only:
                with CONSOLE.status(f"{gateway.name}: virtual environment"):
                    try:
                        venv = self.arguments.venvs / gateway.folder
                        self._pythons[gateway.name] = prepare(venv, gateway.requirements)
                    except InstallError as error:
                        self._fail(gateway.name, error)

    def _fail(self, name: str, error: BaseException) -> None:
        self.failed[name] = " ".join(str(error).split())[-MOST_CHARACTERS:] or type(error).__name__
        CONSOLE.print(f"{name}: {self.failed[name]}")

    def measure(self) -> None:
        """Run all scenarios. With one engine, all gateways run all the time; with two, each is started for its turn."""
        wanted = [
            [each for each in scenarios(turn + 1) if each.name in self.arguments.scenarios]
            for turn in range(self.plan.rounds)
        ]
        if any(not scenario.kill for scenario in wanted[0]):
            with processes(LIMIT_S) as (_, home), running_engine() as engine, ExitStack() as stack:
                members = [
                    found for name in self.arguments.only if (found := self._started(name, [engine], home, stack))
                ]
                for member in members:
                    self._warm(member, engine)
                for number in range(len(wanted[0])):
                    for turn, several in enumerate(wanted):
                        if not several[number].kill:
                            for member in _rotated(members, turn):
                                self._run(several[number], turn, member, engine)
        for turn, several in enumerate(wanted):
            for scenario in several:
                if scenario.kill:
                    for name in _rotated([name for name in self.arguments.only if name not in self.failed], turn):
                        self._run_two_engines(scenario, turn, name)

    def _run_two_engines(self, scenario: Scenario, turn: int, name: str) -> None:
        with (
            processes(LIMIT_S) as (_, home),
            running_engine() as engine,
            running_engine() as victim,
            ExitStack() as stack,
        ):
            member = self._started(name, [engine, victim], home, stack)
            if member is not None:
                self._warm(member, engine)
                self._run(scenario, turn, member, engine, victim)

    def _started(self, name: str, engines: Sequence[RunningEngine], home: Path, stack: ExitStack) -> Member | None:
        try:
            if name == "direct":
                return Member(direct(engines[0]))
            if name == "tierlane":
                return tierlane(engines, self.plan, home, stack)
            if name not in self._pythons:
                return None
            gateway = next(each for each in GATEWAYS if each.name == name)
            port = self.arguments.port + 2 * GATEWAYS.index(gateway)
            place = Place(self._pythons[name], home / name, port)
            return _member(gateway, place, [engine.url for engine in engines])
        except FAULTS as error:
            self._fail(name, error)
            return None

    def _warm(self, member: Member, engine: RunningEngine) -> None:
        closed = next(each for each in scenarios(0) if each.name == "closed")
        run_side(member.side, engine, member.loads(closed), Span(0.0, WARM_S), wait=False)
        idle_after_s(member, engine)

    def _run(
        self, scenario: Scenario, turn: int, member: Member, engine: RunningEngine, victim: RunningEngine | None = None
    ) -> None:
        arguments, name = self.arguments, member.side.name
        span = scenario.span(arguments.warm_seconds, arguments.seconds, arguments.drain_seconds)
        loads = member.loads(scenario)
        time.sleep(SETTLE_S)
        try:
            with changed(scenario, engine, victim, span):
                found = asdict(figures(run_side(member.side, engine, loads, span, wait=False), loads))
            # A gateway with a killed engine is not needed any more.
            found["idle_after_s"] = 0.0 if victim else idle_after_s(member, engine)
        except FAULTS as error:
            found = {"failed": str(error) or type(error).__name__}
        self.runs.append({"scenario": scenario.name, "round": turn, "gateway": name, **found})
        text = found.get("failed") or f"{found['tokens_per_s']:,.0f} tokens/s, goodput {found['goodput_per_s']:,.0f}"
        CONSOLE.print(f"{time.strftime('%H:%M:%S')} {scenario.name}, round {turn + 1}, {name}: {text}")

    def document(self) -> dict[str, Any]:
        """The raw data."""
        arguments = self.arguments
        lengths = {name: getattr(arguments, name) for name in ("seconds", "warm_seconds", "drain_seconds", "rounds")}
        about = [NO_GATEWAY, TIERLANE, *(gateway.about() for gateway in GATEWAYS)]
        gateways = [
            {**each, "failed": self.failed.get(each["name"], "")} for each in about if each["name"] in arguments.only
        ]
        titles = [{"name": each.name, "title": each.title} for each in scenarios(1) if each.name in arguments.scenarios]
        date = time.strftime("%Y-%m-%d", time.gmtime())
        return {
            "date": date,
            "machine": machine(),
            **lengths,
            "gateways": gateways,
            "scenarios": titles,
            "runs": self.runs,
        }


def _rotated(several: Sequence[Any], turn: int) -> Sequence[Any]:
    at = turn % max(1, len(several))
    return [*several[at:], *several[:at]]


def _member(gateway: Gateway, place: Place, engines: Sequence[str]) -> Member:
    side, process = start(gateway, place, engines)

    def start_again() -> None:
        nonlocal process
        _kill(process)
        _, process = start(gateway, place, engines)

    return Member(side._replace(cpu=lambda: cpu_of(process)), gateway=gateway, start_again=start_again)


def _kill(root: psutil.Process) -> None:
    several = [root, *root.children(recursive=True)]
    for process in several:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(several, timeout=SETTLE_S)


def idle_after_s(member: Member, engine: RunningEngine) -> float | None:
    """Seconds until the engine is idle, after all clients left. A gateway that keeps it busy is started again: None. A gateway
    may pause before it sends what it still has, so the engine has to stay idle for a while.
    """
    try:
        seconds = wait_until_idle(engine, IDLE_S if member.start_again else LONGEST_IDLE_S)
    except RuntimeError:
        if member.start_again is None:
            raise
    else:
        before = engine.state()["totals"]["generated_tokens"]
        time.sleep(STAYS_IDLE_S)
        if member.start_again is None or engine.state()["totals"]["generated_tokens"] == before:
            return seconds
    with suppress(StartError):  # Its next run fails then.
        member.start_again()
    wait_until_idle(engine)
    return None


def tierlane(engines: Sequence[RunningEngine], plan: Plan, home: Path, exits: ExitStack) -> Member:
    """A stack with a worker for each engine, and two more customers of the tier free."""
    stack = exits.enter_context(stack_before(engines[0], plan, 1, limited=True))
    stack.sql(TIERS_RAISED, SELL_EVERYTHING, CUSTOMERS)
    quiet, noisy = str(stack.value(KEYS)).split()
    wait_for_key(stack, noisy)
    for number, engine in enumerate(engines[1:], start=2):
        _add_worker(stack, engine, f"worker-{number}", home)
    return Member(through(stack), {**stack.info.keys, "quiet": quiet, "noisy": noisy})


def _add_worker(stack: Stack, engine: RunningEngine, name: str, home: Path) -> None:
    """Start a worker like the first one, before another engine, and wait until it is healthy."""
    first = next(each for each in stack.info.processes if each.role == "worker")
    own = {"WORKER_ID": name, "BACKEND": f"{engine.backend}#{MODEL}", "DATA_DIR": str(home / name)}
    environment = psutil.Process(first.pid).environ() | {f"TIERLANE_{key}": value for key, value in own.items()}
    with (home / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "tierlane", "worker"]
        psutil.Popen(command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 60.0
    while stack.operator_get("/internal/health")["healthy_gpus"] < 2:
        if time.monotonic() > deadline:
            raise StartError("the second worker did not become healthy within 60 s")
        time.sleep(SETTLE_S)


@contextmanager
def changed(scenario: Scenario, engine: RunningEngine, victim: RunningEngine | None, span: Span) -> Iterator[None]:
    """What happens to the engine in a scenario, from a thread; at the end it is as fast as before."""

    def change(stopped: threading.Event) -> None:
        if scenario.slow and not stopped.wait(span.warm_s + span.seconds / 5):
            engine.control(factor=SLOW_FACTOR)
            stopped.wait(SLOW_S)
            engine.control(factor=1.0)
        if victim is not None and not stopped.wait(span.warm_s + span.seconds / 3):
            os.kill(victim.pid, signal.SIGKILL)

    engine.control(factor=scenario.factor)
    try:
        with in_thread(change):
            yield
    finally:
        engine.control(factor=1.0)


def main() -> int:
    """Measure; return the exit code."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Like an exception, so that all processes are stopped.
    adopt_orphans()
    comparison = Comparison(arguments)
    comparison.install()
    if arguments.install_only:
        return int(bool(comparison.failed))
    parts = set(NAMES) - set(arguments.only) or set(SCENARIOS) - set(arguments.scenarios)
    whole = not (arguments.quick or arguments.json or parts)
    try:
        comparison.measure()
    finally:
        document = comparison.document()
        if target := DATA if whole else arguments.json:
            target.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    page = render(document)
    if whole:
        PAGE.write_text(page, "utf-8")
    sys.stdout.write(page)
    failed = [run for run in comparison.runs if "failed" in run]
    return int(bool(failed or comparison.failed))


if __name__ == "__main__":
    sys.exit(main())
