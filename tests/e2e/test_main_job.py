"""The main job, from outside: a key, a request, an answer from the model, an audit row."""

from collections.abc import Mapping

import aiohttp
import pytest

from stack import Stack


async def post(stack: Stack, tier: str, body: dict[str, object]) -> tuple[int, dict[str, object], Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/inference", json=body, headers=stack.headers(tier)) as r,
    ):
        return r.status, await r.json(), r.headers.copy()


@pytest.mark.parametrize("tier", ["enterprise", "paid", "free"])
async def test_each_tier_gets_its_answer_and_its_row(simulated: Stack, tier: str) -> None:
    """The answer names itself, its tier and where the time went; the audit holds the same in one row."""
    status, body, headers = await post(simulated, tier, {"input": f"hello {tier}"})

    assert status == 200
    assert body["output"] == f"hello {tier}"[::-1]
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    assert (metadata["tier"], metadata["attempts"], metadata["cached"]) == (tier, 1, False)
    assert metadata["gpu_ms"] >= 50
    assert headers["x-request-id"] == body["request_id"]
    request_id = str(body["request_id"])
    row = (await simulated.audited([request_id]))[request_id]
    assert (row["status"], row["tier"], row["http_status"], row["attempts"]) == ("completed", tier, 200, 1)
    assert row["input_bytes"] == len(f"hello {tier}")


async def test_the_model_that_ships_writes_text(tiny_stack: Stack) -> None:
    """Real text from the real torch model, the same each time at temperature 0."""
    first = await post(tiny_stack, "free", {"input": "The hacker said", "parameters": {"max_tokens": 32}})
    second = await post(tiny_stack, "enterprise", {"input": "The hacker said", "parameters": {"max_tokens": 32}})

    assert (first[0], second[0]) == (200, 200)
    assert isinstance(first[1]["output"], str)
    assert len(first[1]["output"]) > 10
    assert first[1]["output"] == second[1]["output"]


async def test_a_parameter_that_the_model_refuses_is_named(tiny_stack: Stack) -> None:
    """The backend's own check reaches the client as a 400, and the request is in the audit."""
    status, body, _ = await post(tiny_stack, "paid", {"input": "x", "parameters": {"temperature": 9}})

    error = body["error"]
    assert isinstance(error, dict)
    assert (status, error["code"]) == (400, "invalid_request")
    assert "temperature" in str(error["message"])
