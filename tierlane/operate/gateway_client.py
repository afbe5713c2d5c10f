"""Calls of a gateway: its address and token, its readiness and its health."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tierlane.connect import VerbError, find_local_stack
from tierlane.settings.model import Settings, SettingsError

TIMEOUT_S = 3.0

_POOL = re.compile(r"^Pools? [^:]+: ")


class GatewayAddress(NamedTuple):
    """The URL of a gateway, and the service token for `/internal/*`."""

    url: str
    token: str


def gateway_of(settings: Settings, url: str | None) -> GatewayAddress | None:
    """The gateway at `url`, or that of the local stack; None without both. Raises SettingsError without a token."""
    stack = find_local_stack(settings.data_dir)
    token = settings.service_token.get_secret_value()
    if url is None:
        if stack is None or not stack.http_url:
            return None
        url, token = stack.http_url, token or stack.service_token
    if not token:
        raise SettingsError("TIERLANE_SERVICE_TOKEN: is not set; /internal/health needs it")
    return GatewayAddress(url.rstrip("/"), token)


async def is_ready(session: aiohttp.ClientSession, gateway: GatewayAddress) -> bool:
    """Whether `/readyz` returns 200. Raises VerbError without a response."""
    status, _ = await _get(session, gateway, "/readyz", {})
    return status == 200


async def read_health(session: aiohttp.ClientSession, gateway: GatewayAddress) -> dict[str, Any]:
    """The document of `/internal/health`, with any status. Raises VerbError if there is none."""
    headers = {"Authorization": f"Bearer {gateway.token}"}
    status, body = await _get(session, gateway, "/internal/health", headers)
    if status == 401:
        raise VerbError(f"The gateway at {gateway.url} rejects the service token.")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise VerbError(
            f"{gateway.url} is not a gateway: it returned status {status} without a health document."
        ) from error


class AdvisedReason(NamedTuple):
    """A reason of a health document, what to do, and the path of the runbook ("" if the gateway reports none)."""

    reason: str
    action: str = ""
    runbook: str = ""


def advised_reasons(document: Mapping[str, Any]) -> list[AdvisedReason]:
    """The reasons of a health document with the advice of their checks. The document may have any form."""
    reasons, checks = document.get("reasons"), document.get("checks")
    advice: dict[str, tuple[str, str]] = {}
    for several in checks.values() if isinstance(checks, dict) else ():
        for check in several if isinstance(several, list) else ():
            if isinstance(check, dict) and check.get("output"):
                advice[str(check["output"])] = str(check.get("action", "")), str(check.get("runbook", ""))
    return [
        # With several pools, a reason begins with its pools.
        AdvisedReason(text, *(advice.get(text) or advice.get(_POOL.sub("", text)) or ()))
        for text in map(str, reasons if isinstance(reasons, list) else ())
    ]


async def _get(
    session: aiohttp.ClientSession,
    gateway: GatewayAddress,
    path: str,
    headers: Mapping[str, str],
    *,
    is_retry: bool = False,
) -> tuple[int, bytes]:
    """Status and body of the response.

    After a timeout it is tried once more: the new connection may reach another of several gateways that share a port.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(f"{gateway.url}{path}", headers=headers, timeout=timeout) as response:
            return response.status, await response.read()
    except TimeoutError as error:
        if not is_retry:
            return await _get(session, gateway, path, headers, is_retry=True)
        raise VerbError(
            f"The gateway at {gateway.url} does not respond within {TIMEOUT_S:.0f} s. It may be suspended, alone or as one of "
            "several gateways that share the port: `ps` shows T, and `kill -CONT PID` resumes it."
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        fault = str(error) or type(error).__name__
        raise VerbError(f"The gateway at {gateway.url} does not respond: {fault}.") from error
