"""Models of known speed for the case `capacity`: a function, and an endpoint.

The endpoint runs as a script: `python capacity_models.py PORT`.
"""
# ruff: noqa: INP001 - a script, and a module for a worker

import asyncio
import os
import sys
import time
from pathlib import Path

BASE_S, ITEM_S = 0.05, 0.01
AT_ONCE = 4
"""The number of batches that the endpoint runs at a time."""


def run_s(items: int) -> float:
    """The duration of a batch in seconds."""
    return BASE_S + ITEM_S * items


def capacity_rps(gpus: int, batch: int) -> float:
    """Requests/s of a number of GPUs with full batches."""
    return gpus * batch / run_s(batch)


def timed(inputs: list[str]) -> list[str]:
    """Run a batch for its duration times the factor in the file CAPACITY_FACTOR."""
    factor = float(Path(os.environ["CAPACITY_FACTOR"]).read_text("utf-8"))
    time.sleep(run_s(len(inputs)) * factor)
    return [text[::-1] for text in inputs]


async def serve(port: int) -> None:
    """Run the endpoint: /v1/models, and /v1/completions for a prompt or a list of prompts."""
    from aiohttp import web  # noqa: PLC0415 - not for workers

    turns = asyncio.Semaphore(AT_ONCE)

    async def complete(request: web.Request) -> web.Response:
        prompt = (await request.json()).get("prompt")
        if prompt is None:
            raise web.HTTPBadRequest
        prompts = [prompt] if isinstance(prompt, str) else prompt
        async with turns:
            await asyncio.sleep(run_s(len(prompts)))
        choices = [{"index": i, "text": each[::-1], "finish_reason": "stop"} for i, each in enumerate(prompts)]
        usage = {"prompt_tokens": len(prompts), "completion_tokens": len(prompts), "total_tokens": 2 * len(prompts)}
        return web.json_response({"object": "text_completion", "model": "timed", "choices": choices, "usage": usage})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "timed", "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
