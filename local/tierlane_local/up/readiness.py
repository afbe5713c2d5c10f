"""Readiness of a stack: each gateway is ready and has seen a healthy worker of each pool, or one whose model is too slow."""

import asyncio
import http.client
import json
import sys
from collections.abc import Collection
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gateway.operations.health.model import process_name
from tierlane_local.up.model_times import SLOW, measured_workers

POLL_S = 0.1
CALL_TIMEOUT_S = 1.0
OK = 200
DISTRIBUTES = sys.platform == "linux"  # New connections to the gateways on one port; elsewhere one of them gets all.


class Unready:
    """What the stack waits for: `gateways` that are not ready, or `pools` in which a ready gateway sees no healthy worker."""

    def __init__(self, gateways: Collection[str] = ()) -> None:
        self.gateways = set(gateways)
        self.pools: Collection[str] = ()


async def wait_until_ready(
    http_url: str,
    service_token: str,
    redis_urls: Collection[str],
    pools: Collection[str],
    gateways: Collection[str],
    *,
    gone_ms: int,
    unready: Unready | None = None,
) -> None:
    """Return when each of the gateways serves these pools, in any cell; the caller sets the deadline, and may read `unready`.

    They share a port, so a new connection reaches any of them; a poll makes as many connections as there are gateways.
    """
    unready = unready or Unready()
    unready.gateways = set(gateways)
    while True:
        for _ in gateways:
            seen = await asyncio.to_thread(_look, http_url, service_token, pools)
            unready.pools = seen.unserved if seen is not None else ()
            if seen is None:
                break
            workers = await measured_workers(redis_urls, seen.unserved, gone_ms) if seen.unserved else {}
            # A pool has not started. With a model that is too slow, it has, but without a healthy worker.
            if any(all(worker.status != SLOW for worker in workers[pool]) for pool in seen.unserved):
                break
            unready.gateways.discard(seen.gateway)
            if not unready.gateways or not DISTRIBUTES:
                return
        await asyncio.sleep(POLL_S)


class _Look(NamedTuple):
    """What one gateway sees: its name, and the pools without a healthy worker."""

    gateway: str
    unserved: list[str]


def _look(http_url: str, service_token: str, pools: Collection[str]) -> _Look | None:
    """What the gateway sees that accepts a new connection; None if it is not ready."""
    address = urlsplit(http_url)
    # One connection, so that the same gateway returns both responses; proxies of the environment do not apply to it.
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=CALL_TIMEOUT_S)
    try:
        with closing(connection):
            if _get(connection, "/readyz")[0] != OK:
                return None
            state: Any = json.loads(_get(connection, "/internal/dashboard/events", service_token)[1])
        healthy = {each["name"]: int(each["healthy_gpus"]) for each in state["pools"]}
        healthy = healthy or dict.fromkeys(pools, int(state["healthy_gpus"]))
        unserved = [
            pool for pool in pools if sum(n for place, n in healthy.items() if place.partition("@")[0] == pool) < 1
        ]
        down = state["status"] == "down" and not unserved  # It is down, too, without a healthy worker.
        return None if down else _Look(process_name(state["gateway"]), unserved)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None


def _get(connection: http.client.HTTPConnection, path: str, token: str = "") -> tuple[int, bytes]:
    """Status and body of the response."""
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    return response.status, response.read()
