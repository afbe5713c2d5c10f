"""When a stack is ready: a gateway says so, and at least one worker of each pool has its model loaded."""

import asyncio
import http.client
import json
import urllib.request
from typing import Any

POLL_S = 0.1
CALL_TIMEOUT_S = 1.0

# Proxies of the environment are not for a gateway on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def wait_until_ready(http_url: str, service_token: str) -> None:
    """Return when requests can be served; the caller sets the deadline."""
    while not await asyncio.to_thread(_is_ready, http_url, service_token):  # noqa: ASYNC110 - a poll over HTTP
        await asyncio.sleep(POLL_S)


def _is_ready(http_url: str, service_token: str) -> bool:
    if _get(f"{http_url}/readyz", None) is None:
        return False
    body = _get(f"{http_url}/internal/health", service_token)
    return body is not None and _healthy_gpus(body) >= 1


def _healthy_gpus(body: bytes) -> int:
    """Of the pool that has the fewest."""
    try:
        health: Any = json.loads(body)
        pools = health.get("pools", {"": health})
        return min(int(pool["healthy_gpus"]) for pool in pools.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0


def _get(url: str, token: str | None) -> bytes | None:
    """Return the body of a 200 answer, None for any other answer, for none, and for what is no answer at all."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the URL is always our own http://
    try:
        with _opener.open(request, timeout=CALL_TIMEOUT_S) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
