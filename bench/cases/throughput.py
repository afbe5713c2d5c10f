"""Throughput with everything on: 34 simulated GPUs, two gateways, 1,000 and 2,000 connections, beside a bare echo."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from cases import wrk
from cases.outcome import Check, Outcome, at_least, at_most, none_of, over, told
from cases.stand import Stand, started, used_us

from tierlane.bench.resources import ProcessInfo, read_cpu
from tierlane.up.data_dir import held_port

CONNECTIONS = (1000, 2000)
GATEWAYS = 2
LEAST_RATE = {1000: 10_000, 2000: 13_000}
MOST_P99_MS = 250
MOST_OVER_ECHO = 1.6
ROWS_S = 30.0
ROWS = "SELECT count(*) FROM requests WHERE status IN ('completed', 'failed')"


def run(*, quick: bool) -> Outcome:
    """Measure with wrk where it is installed, else with the project's own generator."""
    seconds, warm = (8, 3) if quick else (60, 10)
    measure = _wrk_beside_echo if wrk.installed() else _bench_beside_echo
    with started(workers=34, gateways=GATEWAYS) as stand:
        stand.raise_limits()
        data = {str(connections): measure(stand, connections, seconds, warm) for connections in CONNECTIONS}
    return Outcome(judge(data), data, load_notes())


def load_notes() -> list[str]:
    """What to say of the load, where it is not the usual one."""
    return [] if wrk.installed() else ["wrk is not installed, so the load is that of `tierlane bench --mode closed`."]


def judge(data: Mapping[str, Any]) -> list[Check]:
    """The figures of each number of connections beside their targets."""
    checks = []
    for name, found in data.items():
        connections, label = int(name), f"{int(name):,} connections"
        checks += [
            at_least(f"{label}: requests/s", found["rate"], LEAST_RATE[connections]),
            told(f"{label}: p50", f"{found['p50_ms']:.1f} ms"),
            at_most(f"{label}: p99", found["p99_ms"], MOST_P99_MS, " ms")
            if connections == CONNECTIONS[0]
            else told(f"{label}: p99", f"{found['p99_ms']:.1f} ms"),
            none_of(f"{label}: errors", found["errors"]),
            none_of(f"{label}: answers without their audit row, or rows too many", found["rows_off"]),
            told(f"{label}: CPU of a bare echo", f"{found['echo_us']:.1f} us"),
            told(f"{label}: CPU of a request, all roles", by_role(found["cpu_us"])),
            at_most(f"{label}: CPU over the echo's", over(_total(found), found["echo_us"]), MOST_OVER_ECHO, " x", 2),
        ]
    return checks


def by_role(cpu_us: Mapping[str, float]) -> str:
    """The sum and its parts, the largest first."""
    parts = ", ".join(f"{role} {us:.1f}" for role, us in sorted(cpu_us.items(), key=lambda pair: -pair[1]))
    return f"{sum(cpu_us.values()):.1f} us ({parts})"


def _total(found: Mapping[str, Any]) -> float:
    return float(sum(found["cpu_us"].values()))


def loaded(stand: Stand, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    """What clients see after `warm` seconds of the same, what it cost, and the audit's rows of it."""
    if wrk.installed():
        return _with_wrk(stand, connections, seconds, warm)
    return _as_wrk_tells(_bench(stand, connections, seconds, warm, echo="off"))


def _wrk_beside_echo(stand: Stand, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    echo_us = _echo_us(connections, max(3, min(seconds // 2, 15)), list(stand.stack.keys.values()))
    return {**_with_wrk(stand, connections, seconds, warm), "echo_us": echo_us}


def _bench_beside_echo(stand: Stand, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    found = _bench(stand, connections, seconds, warm, echo="on")
    return {**_as_wrk_tells(found), "echo_us": found["echo"]["cpu_us"]}


def _with_wrk(stand: Stand, connections: int, seconds: int, warm: int) -> dict[str, Any]:
    keys = list(stand.stack.keys.values())
    warmed = wrk.load(stand.stack.http_url, connections, warm, keys)
    _settled(stand, warmed.requests)
    rows, before = int(stand.value(ROWS)), stand.reading()
    found = wrk.load(stand.stack.http_url, connections, seconds, keys)
    cpu_us = used_us(before, stand.reading(), found.requests)
    new = _settled(stand, rows + found.requests) - rows
    # wrk does not count what is under way when it stops, at most one a connection; the system still runs it.
    low, high = found.requests - found.refused, found.requests - found.refused + connections
    return {
        "rate": found.rate,
        "p50_ms": found.p50_ms,
        "p99_ms": found.p99_ms,
        "max_ms": found.max_ms,
        "errors": found.refused + found.broken,
        "requests": found.requests,
        "rows": new,
        "rows_off": max(low - new, new - high, 0),
        "cpu_us": cpu_us,
    }


def _settled(stand: Stand, wanted: int) -> int:
    """The final rows, once there are so many and no more come."""
    deadline, seen = time.monotonic() + ROWS_S, -1
    while time.monotonic() < deadline:
        now = int(stand.value(ROWS))
        if now >= wanted and now == seen:
            break
        seen = now
        time.sleep(1.0)
    return max(seen, 0)


def _echo_us(connections: int, seconds: int, keys: list[str]) -> float:
    """What the same requests cost where nothing is done with them; keys and all, so that as much is parsed."""
    with _echo() as (url, processes):
        wrk.load(url, connections, 2, keys)
        before = read_cpu(processes)
        found = wrk.load(url, connections, seconds, keys)
        return sum(used_us(before, read_cpu(processes), found.requests).values())


@contextmanager
def _echo() -> Iterator[tuple[str, list[ProcessInfo]]]:
    """As many echo processes as there are gateways, on one port."""
    with ExitStack() as stack:
        port = stack.enter_context(held_port("127.0.0.1", 0))
        processes = [stack.enter_context(_echo_process(port)) for _ in range(GATEWAYS)]
        yield f"http://127.0.0.1:{port}", [ProcessInfo("echo", f"echo-{p.pid}", p.pid) for p in processes]


@contextmanager
def _echo_process(port: int) -> Iterator["subprocess.Popen[str]"]:
    """One, which listens."""
    command, pipe = [sys.executable, "-m", "tierlane.bench.echo_server", str(port)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def _bench(stand: Stand, connections: int, seconds: int, warm: int, *, echo: str) -> dict[str, Any]:
    return stand.bench(mode="closed", connections=connections, duration=seconds, warmup=warm, mix=EVEN, echo=echo)


def _as_wrk_tells(found: Mapping[str, Any]) -> dict[str, Any]:
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
