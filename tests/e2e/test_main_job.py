"""An inference request from outside: a key, a response of the model, and an audit row."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from stack import Stack


async def send(stack: Stack, tier: str, **body: object) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/inference", json=body, headers=stack.headers(tier)) as response,
    ):
        return response.status, await response.json(), response.headers.copy()


async def test_each_tier_gets_its_response_and_its_row(simulated: Stack) -> None:
    """The response has the tier and the times; the audit has the same in one row."""
    for tier in ("enterprise", "paid", "free"):
        status, body, headers = await send(simulated, tier, input=f"hello {tier}")
        metadata, request_id = body["metadata"], body["request_id"]
        row = (await simulated.audited([request_id]))[request_id]

        assert (status, body["output"]) == (200, f"hello {tier}"[::-1])
        assert (metadata["tier"], metadata["attempts"], metadata["cached"]) == (tier, 1, False)
        assert metadata["gpu_ms"] >= 50
        assert headers["x-request-id"] == request_id
        assert (row["status"], row["tier"], row["http_status"], row["attempts"]) == ("completed", tier, 200, 1)
        assert row["input_bytes"] == len(f"hello {tier}")


async def test_the_model_that_ships_writes_text(tiny_stack: Stack) -> None:
    """The same text each time at temperature 0; a parameter that the model rejects is a 400 that names it."""
    responses = [
        await send(tiny_stack, t, input="The sea", parameters={"max_tokens": 32}) for t in ("free", "enterprise")
    ]
    status, body, _ = await send(tiny_stack, "paid", input="x", parameters={"temperature": 9})

    assert [response[0] for response in responses] == [200, 200]
    assert len(responses[0][1]["output"]) > 10
    assert responses[0][1]["output"] == responses[1][1]["output"]
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert "temperature" in body["error"]["message"]
