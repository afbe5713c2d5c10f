"""Metrics, log lines and traces of a whole stack contain nothing that clients sent."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from eventually import eventually
from otlp_receiver import Receiver, receiver
from stack import Stack, start_stack

PROMPT = "canary-prompt-5d1f"
SECRET = "canary-secret-9a3e"
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": PROMPT}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/inference", {"input": PROMPT}),
    ("/v1/inference", {"input": PROMPT, "parameters": {"x": SECRET}}),
    ("/v1/inference", {"input": PROMPT, SECRET: 1}),
    ("/v1/inference", {"input": PROMPT, "model": SECRET}),
    ("/v1/completions", {"model": "simulated", "prompt": [PROMPT, PROMPT]}),
    ("/v1/completions", {"model": "simulated", "prompt": PROMPT, "stream": True}),
    ("/v1/chat/completions", CHAT),
]


def written(stack: Stack) -> list[str]:
    """The lines of the processes of the stack; `up` itself prints the demo keys."""
    lines = (stack.data_dir.parent / "up.log").read_text().splitlines()
    return [line for line in lines if re.match(r"[a-z0-9-]+ +\| ", line)]


def request_lines(stack: Stack) -> list[dict[str, Any]]:
    return [json.loads(line.partition(" | ")[2]) for line in written(stack) if '"event":"request"' in line]


async def test_no_output_contains_prompts_or_secrets(tmp_path: Path) -> None:
    """Prompts, keys, tokens and bad bodies are sent to every endpoint; no log line, metric, file or span contains them."""
    environment = {"TIERLANE_REQUEST_LOG": "on", "TIERLANE_TRACES_SAMPLE": "1"}
    with receiver() as collector:
        environment["TIERLANE_TRACES_ENDPOINT"] = collector.url
        await check(tmp_path, collector, environment)


async def check(home: Path, collector: Receiver, environment: dict[str, str]) -> None:
    options = ("--gateways", "2", "--workers", "1", "--backend", "simulated:5")
    statuses = []
    with start_stack(home, *options, environment=environment) as stack:
        await stack.healthy(1)
        async with aiohttp.ClientSession(headers=stack.headers("free")) as session:
            bad_key = {"Authorization": f"Bearer tl_{SECRET}"}
            for number, (path, body) in enumerate([*BODIES, BODIES[0]]):
                headers = {"Idempotency-Key": f"{SECRET}-{number}", "traceparent": f"00-{SECRET}-x-01"}
                headers |= {"User-Agent": SECRET} | (bad_key if number == len(BODIES) else {})
                async with session.post(stack.url + path, json=body, headers=headers) as response:
                    await response.read()
                    statuses.append(response.status)
            async with session.get(f"{stack.url}/metrics") as response:
                metrics = await response.read()
        await eventually(
            lambda: any(line["endpoint"] == "/v1/chat/completions" for line in request_lines(stack)), "its log line"
        )
        await eventually(lambda: {"request", "infer"} <= {span.name for span in collector.spans}, "spans")
        secrets = [PROMPT, PROMPT[::-1], SECRET, stack.key("free").rpartition("_")[2]]
        stored = b"".join(file.read_bytes() for file in (stack.data_dir / "metrics").iterdir())
        stored += metrics + b"".join(collector.bodies)
        output, completed = "\n".join(written(stack)), request_lines(stack)

    assert statuses[0] == 200
    assert {200, 400, 401, 404} <= set(statuses)
    completed = [line for line in completed if line["outcome"] == "completed"]
    assert {line["endpoint"] for line in completed} >= {"/v1/completions", "/v1/chat/completions"}
    assert {"request_id", "customer_id", "key_id", "latency_ms", "queue_wait_ms", "infer_ms", "gpu"} <= set(
        completed[0]
    )
    assert [word for word in secrets if word in output or word.encode() in stored] == []
