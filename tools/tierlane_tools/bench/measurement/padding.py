"""The padding of batches, from the gateway's health."""

import aiohttp
import msgspec

TIMEOUT_S = 2.0


class _Health(msgspec.Struct):
    padding_waste: float


async def read_padding(http_url: str, service_token: str) -> float | None:
    """The share (0..1) over all healthy workers' late batches; None where the gateway does not tell."""
    headers = {"Authorization": f"Bearer {service_token}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session,
            session.get(f"{http_url}/internal/health") as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=_Health).padding_waste
    except (
        aiohttp.ClientError,
        TimeoutError,
        msgspec.MsgspecError,
    ):  # The last of them: a refusal, or another document.
        return None
