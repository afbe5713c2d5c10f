"""When a stack with several gateways is whole: each of them says that it is ready and counts every worker healthy."""

import asyncio
from collections.abc import Sequence

import aiohttp

POLL_S = 0.1
CALL_TIMEOUT_S = 1.0


async def wait_until_whole(http_urls: Sequence[str], service_token: str, workers: int) -> None:
    """Return when it is; the caller sets the deadline."""
    headers = {"Authorization": f"Bearer {service_token}"}
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while not all([await _is_whole(session, url, workers) for url in http_urls]):  # noqa: ASYNC110 - a poll over HTTP
            await asyncio.sleep(POLL_S)


async def _is_whole(session: aiohttp.ClientSession, url: str, workers: int) -> bool:
    try:
        async with session.get(f"{url}/readyz") as ready:
            if ready.status != 200:
                return False
        async with session.get(f"{url}/internal/health") as answer:
            health = await answer.json(content_type=None)
        return bool(health["healthy_gpus"] >= workers and health["status"] == "healthy")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return False
