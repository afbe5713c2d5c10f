"""A batch while its gateway is killed and Redis is emptied: each line is once in the result files."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from redis.asyncio import Redis

from admin import sql
from eventually import eventually
from second_gateway import second_gateway
from stack import Stack

LINES = 600


def client_of(stack: Stack, url: str) -> openai.AsyncOpenAI:
    """OpenAI's client of one gateway."""
    return openai.AsyncOpenAI(api_key=stack.key("enterprise"), base_url=f"{url}/v1", max_retries=10)


async def counts(stack: Stack, batch_id: str) -> tuple[str, int]:
    """Owner and number of ended lines."""
    (row,) = await sql(stack, "SELECT owner, completed + failed AS ended FROM batches WHERE id = $1", batch_id)
    return row["owner"] or "", row["ended"]


async def test_another_gateway_continues(simulated: Stack, tmp_path: Path) -> None:
    """The gateway that runs the batch is killed, then a worker, and Redis is emptied: nothing is lost or doubled."""
    (row,) = await sql(simulated, "SELECT name FROM models LIMIT 1")
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": row["name"], "prompt": f"line {number}"},
        }
        for number in range(LINES)
    ]
    raw = "\n".join(map(json.dumps, lines)).encode()
    async with second_gateway(simulated, tmp_path) as (process, url):
        async with client_of(simulated, url) as client:
            file = await client.files.create(file=("lines.jsonl", raw), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )

            async def begun() -> str:
                owner, ended = await counts(simulated, batch.id)
                return owner if ended else ""

            owner = await eventually(begun, "some lines have ended")
        redis = Redis.from_url(simulated.redis_url)
        await redis.flushall()
        await redis.aclose()
        if not owner.startswith("gateway-1"):
            process.kill()
        else:
            os.kill(simulated.pids("gateway")["gateway-1"], signal.SIGKILL)
        os.kill(simulated.pids("worker")["worker-2"], signal.SIGKILL)
        async with client_of(simulated, simulated.url) as client:

            async def ended() -> Any:
                await asyncio.sleep(0.1)
                found = await client.batches.retrieve(batch.id)
                return found if found.status == "completed" else None

            last = await eventually(ended, "the batch has ended", 60.0)
            output = await client.files.content(last.output_file_id)
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["text"]
        for each in map(json.loads, output.text.splitlines())
    }
    ids = Counter(json.loads(each)["custom_id"] for each in output.text.splitlines())

    assert (last.request_counts.completed, last.request_counts.failed) == (LINES, 0)
    assert ids == Counter(str(number) for number in range(LINES))
    assert texts == {str(number): f"line {number}"[::-1] for number in range(LINES)}
