"""How these verbs ask a gateway: whose address and token, and its health, also where that is bad."""

from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from tierlane.connect import VerbError, find_local_stack
from tierlane.settings.model import SettingsError

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

TIMEOUT_S = 3.0


class GatewayAddress(NamedTuple):
    """Where a gateway listens, and what opens `/internal/*` there."""

    url: str
    token: str


def gateway_of(settings: "Settings", url: str | None) -> GatewayAddress | None:
    """The gateway at `url`, else the local stack's; None where neither is known. Raises SettingsError without a token."""
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
    """What `/readyz` says. Raises VerbError where nobody answers."""
    try:
        async with session.get(f"{gateway.url}/readyz", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise _away(gateway, error) from error


async def read_health(session: aiohttp.ClientSession, gateway: GatewayAddress) -> dict[str, Any]:
    """The document of `/internal/health`. Raises VerbError where there is none."""
    try:
        async with session.get(
            f"{gateway.url}/internal/health",
            headers={"Authorization": f"Bearer {gateway.token}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        ) as answer:
            status, body = answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise _away(gateway, error) from error
    if status == 401:
        raise VerbError(f"The gateway at {gateway.url} refuses the service token.")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise VerbError(
            f"What answers at {gateway.url} is no gateway: status {status} without a health document."
        ) from error


def _away(gateway: GatewayAddress, error: BaseException) -> VerbError:
    return VerbError(f"The gateway at {gateway.url} does not answer: {str(error) or type(error).__name__}.")
