"""Throughput with everything on: 34 simulated GPUs, two gateways, 1,000 and 2,000 connections, beside a bare echo."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import wrk
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import Stack, started, used_us

from tierlane_local.stack_file import ProcessInfo
from tierlane_local.up.data_dir import held_port
from tierlane_tools.bench.measurement.resources import read_cpu

CONNECTIONS = (1000, 2000)
GATEWAYS = 2
LEAST_RATE = {1000: 10_000, 2000: 13_000}
MOST_P99_MS = 250
MOST_OVER_ECHO = 1.6
ROWS_S = 30.0
ROWS = "SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')"


def run(*, quick: bool) -> Outcome:
    """Measure with wrk where it is installed, else with `tierlane bench`."""
    seconds, warm = (8, 3) if quick else (60, 10)
    measure = _wrk_beside_echo if wrk.installed() else _bench_beside_echo
    with started(workers=34, gateways=GATEWAYS) as stack:
        stack.raise_limits()
        data = {str(connections): measure(stack, connections, seconds, warm) for connections in CONNECTIONS}
    return Outcome(judge(data), data, load_notes())


def load_notes() -> list[str]:
    """A note where wrk is not installed."""
    return [] if wrk.installed() else ["wrk is not installed, so the load is that of `tierlane bench --mode closed`."]


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare the figures of each number of connections with their targets."""
    checks = []
    for name, found in data.items():
        connections, label = int(name), f"{int(name):,} connections"
        checks += [
            at_least(f"{label}: requests/s", found["rate"], LEAST_RATE[connections]),
            figure(f"{label}: p50", f"{found['p50_ms']:.1f} ms"),
            at_most(f"{label}: p99", found["p99_ms"], MOST_P99_MS, " ms")
            if connections == CONNECTIONS[0]
            else figure(f"{label}: p99", f"{found['p99_ms']:.1f} ms"),
            none_of(f"{label}: errors", found["errors"]),
            none_of(f"{label}: answers without their audit row, or rows too many", found["rows_off"]),
            figure(f"{label}: CPU of a bare echo", f"{found['echo_us']:.1f} us"),
            figure(f"{label}: CPU of a request, all roles", by_role(found["cpu_us"])),
            at_most(f"{label}: CPU over the echo's", over(_total(found), found["echo_us"]), MOST_OVER_ECHO, " x", 2),
        ]
    return checks


def by_role(cpu_us: Mapping[str, float]) -> str:
    """The sum and its parts as text, the largest first."""
    parts = ", ".join(f"{role} {us:.1f}" for role, us in sorted(cpu_us.items(), key=lambda pair: -pair[1]))
    return f"{sum(cpu_us.values()):.1f} us ({parts})"


def _total(found: Mapping[str, Any]) -> float:
    return float(sum(found["cpu_us"].values()))


def loaded(stack: Stack, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    """Load after `warm` seconds of the same load: latencies, CPU of a request, and audit rows."""
    if wrk.installed():
        return _with_wrk(stack, connections, seconds, warm)
    return _figures(_bench(stack, connections, seconds, warm, echo="off"))


def _wrk_beside_echo(stack: Stack, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    echo_us = _echo_us(stack, connections, max(3, min(seconds // 2, 15)))
    return {**_with_wrk(stack, connections, seconds, warm), "echo_us": echo_us}


def _bench_beside_echo(stack: Stack, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    found = _bench(stack, connections, seconds, warm, echo="on")
    return {**_figures(found), "echo_us": found["echo"]["cpu_us"]}


def _with_wrk(stack: Stack, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    target = _target(stack.info.http_url, stack)
    _final_rows(stack, wrk.load(target, connections, warm).answered)
    rows, before = int(stack.value(ROWS)), stack.reading()
    found = wrk.load(target, connections, seconds)
    cpu_us = used_us(before, stack.reading(), found.answered)
    new = _final_rows(stack, rows + found.answered) - rows
    # wrk does not count requests that are open when it stops, at most one a connection; the system still runs them.
    low, high = found.answered - found.bad_status, found.answered - found.bad_status + connections
    return {
        "rate": found.rate,
        "p50_ms": found.p50_us / 1000,
        "p99_ms": found.p99_us / 1000,
        "max_ms": found.max_us / 1000,
        "errors": found.errors,
        "requests": found.answered,
        "rows": new,
        "rows_off": max(low - new, new - high, 0),
        "cpu_us": cpu_us,
    }


def _final_rows(stack: Stack, expected: int) -> int:
    """The number of final audit rows, once it is at least `expected` and does not grow."""
    deadline, last = time.monotonic() + ROWS_S, -1
    while time.monotonic() < deadline:
        now = int(stack.value(ROWS))
        if now >= expected and now == last:
            break
        last = now
        time.sleep(1.0)
    return max(last, 0)


def _target(url: str, stack: Stack) -> wrk.Target:
    return wrk.Target(f"{url}/v1/inference", tuple(stack.info.keys.values()))


def _echo_us(stack: Stack, connections: int, seconds: int) -> float:
    """The CPU of the same requests at a bare echo server."""
    with _echo() as (url, processes):
        target = _target(url, stack)
        wrk.load(target, connections, 2)
        before = read_cpu(processes)
        found = wrk.load(target, connections, seconds)
        return sum(used_us(before, read_cpu(processes), found.answered).values())


@contextmanager
def _echo() -> Iterator[tuple[str, list[ProcessInfo]]]:
    """Run as many echo servers as gateways on one port."""
    with ExitStack() as exits:
        port = exits.enter_context(held_port("127.0.0.1", 0))
        processes = [exits.enter_context(_echo_process(port)) for _ in range(GATEWAYS)]
        yield f"http://127.0.0.1:{port}", [ProcessInfo("echo", f"echo-{p.pid}", p.pid) for p in processes]


@contextmanager
def _echo_process(port: int) -> Iterator["subprocess.Popen[str]"]:
    """Run one echo server; it listens when this returns."""
    command, pipe = [sys.executable, "-m", "tierlane_tools.bench.measurement.echo_server", str(port)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def _bench(stack: Stack, connections: int, seconds: int, warm: int, *, echo: str) -> dict[str, Any]:
    return stack.bench(mode="closed", connections=connections, duration=seconds, warmup=warm, mix=EVEN, echo=echo)


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    audit = found["audit"]
    servers = {role: cost * 1000 for role, cost in found["cpu_seconds_per_1000"].items() if role != "generator"}
    return {
        "rate": found["request_throughput"],
        "p50_ms": found["median_e2el_ms"],
        "p99_ms": found["p99_e2el_ms"],
        "max_ms": found["max_e2el_ms"],
        "errors": found["failed"],
        "requests": found["answered"],
        "rows": audit["rows"],
        "rows_off": audit["missing"] + audit["duplicated"] + audit["wrong_status"],
        "cpu_us": servers,
    }


EVEN = "enterprise=1,paid=1,free=1"
