"""Metrics and log lines of a whole stack: two gateways on one port under load, one of them killed; and planted secrets."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from eventually import eventually
from metrics_figures import total
from stack import Stack, start_stack

PROMPT = "canary-prompt-5d1f"
SECRET = "canary-secret-9a3e"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways, two workers, a line for each request."""
    options = ("--gateways", "2", "--workers", "2", "--backend", "simulated:5")
    with start_stack(tmp_path_factory.mktemp("metrics"), *options, environment={"TIERLANE_REQUEST_LOG": "on"}) as up:
        yield up


async def scrape(stack: Stack) -> bytes:
    """One scrape on a connection of its own, so that any of the gateways may answer."""
    async with aiohttp.ClientSession() as session, session.get(f"{stack.url}/metrics") as answer:
        return await answer.read()


async def ask(stack: Stack, **headers: str) -> int:
    """One call on a connection of its own; its status, 0 where there was none."""
    try:
        async with (
            aiohttp.ClientSession(headers=stack.headers("enterprise") | headers) as session,
            session.post(f"{stack.url}/v1/inference", json={"input": PROMPT}) as answer,
        ):
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def told(stack: Stack) -> float:
    return total(await scrape(stack), "tierlane_requests_total")


async def test_whoever_answers_tells_the_sum_and_it_never_falls(stack: Stack) -> None:
    """Under load, and after one of two gateways is killed and started again: what is told is what was asked."""
    await stack.healthy(2)
    seen = [await told(stack)]
    await _asked(stack, seen, 6)
    await eventually(lambda: _all_told(stack, seen[0] + 60), "all calls told by both")
    await _settled(stack)
    pids = stack.pids("gateway")

    os.kill(pids["gateway-1"], signal.SIGKILL)

    await eventually(lambda: stack.pids("gateway") != pids, "another gateway-1")
    await eventually(lambda: _ready(stack), "both gateways serve")
    await _asked(stack, seen, 6)
    await eventually(lambda: _all_told(stack, seen[0] + 120), "all calls told after the kill")
    assert seen == sorted(seen)


async def _asked(stack: Stack, seen: list[float], times: int) -> None:
    """Ten calls at once and a scrape, so many times; what is told is added to `seen`."""
    for _ in range(times):
        assert await asyncio.gather(*(ask(stack) for _ in range(10))) == [200] * 10
        seen.append(await told(stack))


async def _all_told(stack: Stack, count: float) -> bool:
    """Several scrapes, since any gateway may answer."""
    return {await told(stack) for _ in range(6)} == {count}


async def _settled(stack: Stack) -> None:
    """Both gateways' files are as new as the last call: their times are later than now."""
    files = list((stack.data_dir / "metrics").glob("gw-*.tally"))
    assert len(files) == 2
    written = {file: file.stat().st_mtime_ns for file in files}
    await eventually(lambda: all(file.stat().st_mtime_ns > at for file, at in written.items()), "both files written")


async def _ready(stack: Stack) -> bool:
    page = await scrape(stack)
    return total(page, "tierlane_metrics_processes") == 2


async def test_no_output_holds_what_was_planted(stack: Stack) -> None:
    """Prompts, keys, tokens and bad bodies go in at every door; a line comes out for each, and nothing of them."""
    statuses = [await ask(stack), await ask(stack, Authorization=f"Bearer tl_{SECRET}")]
    async with aiohttp.ClientSession(headers=stack.headers("free")) as session:
        for path, body in (
            ("/v1/inference", {"input": PROMPT, SECRET: 1}),
            ("/v1/inference", {"input": PROMPT, "model": SECRET}),
            ("/v1/inference", {"input": PROMPT, "parameters": {"x": SECRET}}),
            ("/v1/completions", {"model": "simulated", "prompt": [PROMPT, PROMPT]}),
            ("/v1/completions", {"model": "simulated", "prompt": PROMPT, "stream": True}),
            ("/v1/chat/completions", {"model": "simulated", "messages": [{"role": "user", "content": PROMPT}]}),
        ):
            headers = {
                "Idempotency-Key": f"{SECRET}-{len(statuses)}",
                "traceparent": f"00-{SECRET}-x-01",
                "User-Agent": SECRET,
            }
            async with session.post(stack.url + path, json=body, headers=headers) as answer:
                await answer.read()
                statuses.append(answer.status)
    log = stack.data_dir.parent / "up.log"

    def written() -> list[str]:
        """What the processes of the stack wrote; `up` itself shows the demo keys to whoever started it."""
        return [line for line in log.read_text().splitlines() if re.match(r"[a-z0-9-]+ +\| ", line)]

    def calls() -> list[dict[str, Any]]:
        found = [json.loads(line.partition(" | ")[2]) for line in written() if '"event":"request"' in line]
        return [line for line in found if line["endpoint"] != "/v1/inference"]

    await eventually(
        lambda: any(line["endpoint"] == "/v1/chat/completions" for line in calls()), "the last call's line"
    )
    planted = [PROMPT, PROMPT[::-1], SECRET, stack.key("free"), stack.key("enterprise").rpartition("_")[2]]
    stored = b"".join(file.read_bytes() for file in (stack.data_dir / "metrics").iterdir()) + await scrape(stack)
    assert statuses[0] == 200
    assert {200, 400, 401, 404} <= set(statuses)
    completed = [line for line in calls() if line["outcome"] == "completed"]
    assert {line["endpoint"] for line in completed} >= {"/v1/completions", "/v1/chat/completions"}
    assert {"request_id", "customer_id", "key_id", "latency_ms", "queue_wait_ms", "infer_ms", "gpu"} <= set(
        completed[0]
    )
    assert [word for word in planted if word in "\n".join(written())] == []
    assert [word for word in planted if word.encode() in stored] == []
