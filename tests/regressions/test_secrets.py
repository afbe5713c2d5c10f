"""A canary key and a canary prompt are sent through every kind of response; no log contains them."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from eventually import eventually
from ledger.catalog.api_key import mint
from ledger.postgres import asyncpg_dsn
from stack import Stack, start_stack

MODEL = """
import os
def answer(texts):
    for text in texts:
        if text.startswith("raise"): raise ValueError(f"cannot read {text}")
        if text.startswith("crash"): os._exit(9)
    return [text[::-1] for text in texts]
"""
CANARY = f"canary{secrets.token_hex(12)}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of the stack, with its logs."""
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def stack(home: Path) -> Iterator[Stack]:
    """A complete stack whose model raises or exits if the prompt contains it."""
    (home / "canary_model.py").write_text(MODEL)
    options = ("--backend", "canary_model:answer", "--workers", "1")
    with start_stack(home, *options, environment={"PYTHONPATH": str(home), "TIERLANE_LOG_LEVEL": "debug"}) as stack:
        yield stack


@pytest.fixture
async def key(stack: Stack) -> str:
    """A new API key, because `up` prints the demo keys."""
    db = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
    await db.execute("INSERT INTO customers (name, tier) VALUES ('canary', 'enterprise')")
    issued: str = await db.fetchval("SELECT issue_api_key('canary', 'test')")
    await db.close()
    return issued


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, stack: Stack, key: str, body: Any, **kind: str) -> tuple[int, str]:
    """Send one request; its status and body."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **kind}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(f"{stack.url}/v1/inference", data=raw, headers=headers) as response:
        return response.status, await response.text()


async def test_no_log_contains_a_key_or_a_prompt(
    home: Path, stack: Stack, key: str, http: aiohttp.ClientSession
) -> None:
    """After 200, 4xx, 5xx, a crash, a dead letter and a malformed HTTP request; nor does an error response or an audit row."""
    foreign = mint().text

    async def is_known() -> bool:
        return (await post(http, stack, key, {"input": CANARY}))[0] == 200

    await eventually(is_known, "the key is known")
    bad = {"input": CANARY, "parameters": {CANARY: [[CANARY]]}}
    responses = [
        await post(http, stack, key, {"input": CANARY}),
        await post(http, stack, key, f'{{"input": "{CANARY}'.encode()),
        await post(http, stack, key, bad),
        await post(http, stack, foreign, {"input": CANARY}),
        await post(http, stack, f"tl_{CANARY}", {"input": CANARY}),
        await post(http, stack, key, {"input": CANARY, "model": CANARY}),
        await post(http, stack, key, {"input": CANARY * 20_000}),
        await post(http, stack, key, {"input": CANARY}, **{"Content-Encoding": "br"}),
        await post(http, stack, key, {"input": f"raise {CANARY}"}),
        await post(http, stack, key, {"input": f"crash {CANARY}"}),
    ]
    assert [status for status, _ in responses] == [200, 400, 400, 401, 401, 404, 413, 415, 422, 503]
    errors = [text for status, text in responses if status not in {200, 400}]
    assert not any(CANARY in text or foreign in text or key in text for text in errors)
    request_ids = [json.loads(text)["error"]["request_id"] for _, text in responses[-2:]]
    await stack.audited(request_ids)
    await send_malformed_http(stack)

    logs = all_logs(home)
    assert b"model lost" in logs
    service_token = stack.info.service_token
    leaked = [secret for secret in (CANARY, key, key[16:], foreign, service_token) if secret.encode() in logs]
    assert leaked == []
    assert await rows_with_canary(stack, request_ids) == []


def all_logs(home: Path) -> bytes:
    """The logs of all processes of the stack."""
    return b"".join(path.read_bytes() for path in home.rglob("*.log") if path.is_file())


async def send_malformed_http(stack: Stack) -> None:
    """Send a request that the HTTP parser rejects."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/inference?key={CANARY} HTTP/1.1\r\nHost: a\r\n{CANARY} : {CANARY}\r\n\r\n".encode())
    assert b" 400 " in await reader.readline()
    writer.close()


async def rows_with_canary(stack: Stack, request_ids: list[str]) -> list[str]:
    """The audit rows with the canary in any field."""
    rows = await stack.rows(request_ids)
    assert all(rows.values())
    return [i for i, found in rows.items() if any(CANARY in str(value) for row in found for value in row.values())]
