"""Streams with the real `openai` client, through the whole of it: gateway, queue, a worker with `tiny`, and back."""

import asyncio

import openai
import pytest

from integration.gateway_fixtures import Stack, openai_client
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.streaming_fixtures import stack, sync_client, texts

__all__ = ["faulty_models", "stack", "start_worker"]

PROMPT = "Once upon a time"


async def test_a_completion_comes_in_pieces(stack: Stack, start_worker: StartWorker) -> None:
    """Together they are what the same request gets without a stream; the last chunks say why it ended and what it used."""
    await (await start_worker(backend="tiny", gpu_timeout_ms=15_000)).reaches("ready")
    async with openai_client(stack) as caller:
        whole = await caller.completions.create(model="tiny", prompt=PROMPT, max_tokens=40)
        stream = await caller.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len([piece for piece in pieces if piece]) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
