"""Real clients against a running stack whose model is an endpoint that has all capabilities: `make clients`.

Each script of tests/clients/ is one client with one API, and runs in a process of its own. A cell of the table in
docs/clients.md is "yes" because its call returned the expected result here; a client without such a call has no function
for it.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from endpoint_stand_in import StandIn, serving
from eventually import eventually
from scheduler.capabilities import Capability
from stack import Stack, free_port, start_stack

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "clients"
OTHERS = {"ai_features", "oidc_provider"}  # Started by other tests.
APART = Path(sys.prefix) / "clients"
"""Where `make clients` installs the packages whose dependencies exclude those of the tests."""

CLIENTS = {
    "openai_chat.py": "`openai`, chat",
    "openai_responses.py": "`openai`, responses",
    "anthropic_messages.py": "`anthropic`",
    "langchain_chat.py": "`langchain-openai`, chat",
    "langchain_responses.py": "`langchain-openai`, responses",
    "instructor_chat.py": "`instructor` on `openai`",
    "litellm_chat.py": "`litellm`, chat",
    "litellm_responses.py": "`litellm`, responses",
    "litellm_messages.py": "`litellm`, messages",
    "openai_chat.js": "npm `openai`, chat",
    "openai_responses.js": "npm `openai`, responses",
    "ai_chat.js": "npm `ai`, `@ai-sdk/openai-compatible`",
    "ai_responses.js": "npm `ai`, `@ai-sdk/openai`",
    "ai_messages.js": "npm `ai`, `@ai-sdk/anthropic`",
    "triton_http.py": "`tritonclient`, HTTP",
    "triton_grpc.py": "`tritonclient`, gRPC",
    "grpc_reflection_client.py": "gRPC by reflection, as `grpcurl`",
}
FEATURES = (
    *("text", "stream", "tools", "streamed tools", "structured output", "image", "embedding", "extension"),
    *("stored", "background", "wrong key"),
)
Results = dict[str, str]
"""The error of each feature that the client has, or ""."""


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[Mapping[str, str]]:
    """The variables that the scripts read, for a stack whose model may do everything."""
    port = free_port()
    with (
        serving(StandIn()) as endpoint,
        start_stack(tmp_path, "--backend", f"openai:{endpoint.url}", "--grpc-port", str(port)) as stack,
    ):
        await allow_everything(stack)
        yield {
            **os.environ,
            "PATH": f"{SCRIPTS / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
            "CLIENT_URL": stack.url,
            "CLIENT_KEY": stack.key("enterprise"),
            "CLIENT_GRPC": f"127.0.0.1:{port}",
        }


async def allow_everything(stack: Stack) -> None:
    """Give the model's row every capability, and wait until the gateway obeys it."""
    names = ",".join(Capability)
    command = ("model", "set", "openai", "--capabilities", names, "--data-dir", str(stack.data_dir))
    await output_of([sys.executable, "-m", "tierlane", *command], os.environ)
    body = {"model": "openai", "messages": [{"role": "user", "content": "hello"}], "beams": 4}

    async def allowed() -> bool:
        async with http.post(f"{stack.url}/v1/chat/completions", json=body) as response:
            return response.status == 200

    async with aiohttp.ClientSession(headers=stack.headers("enterprise")) as http:
        await eventually(allowed, "an unknown field is passed on")


async def output_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The output of a command that must succeed, run in the folder of the scripts."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=SCRIPTS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, f"{command}: {errors.decode()[-3000:]}"
    return output.decode()


async def run(script: str, environment: Mapping[str, str], turns: asyncio.Semaphore) -> Results:
    """The report of a script, the last line of its output."""
    if script.startswith(("instructor", "litellm")):
        environment = {**environment, "PYTHONPATH": str(APART), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    async with turns:
        output = await output_of([sys.executable if script.endswith(".py") else "node", script], environment)
    results: Results = json.loads(output.splitlines()[-1])
    return results


def table(results: Mapping[str, Results]) -> str:
    """The table of docs/clients.md."""
    rows: list[Any] = [("Client", *FEATURES), ("---",) * (len(FEATURES) + 1)]
    for script, client in CLIENTS.items():
        rows.append((client, *("yes" if name in results[script] else "-" for name in FEATURES)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.clients
@pytest.mark.timeout(300)
async def test_clients(environment: Mapping[str, str]) -> None:
    """Every feature that a client has works, and the table in docs/clients.md has exactly these."""
    turns = asyncio.Semaphore(2)
    # Scripts that still run are not cancelled: asyncio waits forever for a process whose start is cancelled.
    ended = await asyncio.gather(*(run(script, environment, turns) for script in CLIENTS), return_exceptions=True)
    assert [str(each) for each in ended if isinstance(each, BaseException)] == []
    found = [each for each in ended if not isinstance(each, BaseException)]
    results = dict(zip(CLIENTS, found, strict=True))

    assert {path.name for path in SCRIPTS.glob("*_*.*") if path.stem not in OTHERS} == set(CLIENTS)
    errors = [f"{script}, {name}: {error}" for script, each in results.items() for name, error in each.items() if error]
    assert errors == [], "\n".join(errors)
    assert {name for each in found for name in each} == set(FEATURES)
    shown = table(results)
    assert shown in (ROOT / "docs" / "clients.md").read_text("utf-8"), f"docs/clients.md needs this table:\n{shown}"
