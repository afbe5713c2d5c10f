"""Secrets stay secret: a canary key and a canary prompt go through every kind of end, and no log ever holds them."""

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
    """Where the stack lives, with its logs."""
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def stack(home: Path) -> Iterator[Stack]:
    """A whole stack whose model raises, or dies, where the prompt says so."""
    (home / "canary_model.py").write_text(MODEL)
    options = ("--backend", "canary_model:answer", "--workers", "1")
    with start_stack(home, *options, environment={"PYTHONPATH": str(home), "TIERLANE_LOG_LEVEL": "debug"}) as stack:
        yield stack


@pytest.fixture
async def key(stack: Stack) -> str:
    """A key of its own, since `up` shows the demo keys on purpose."""
    db = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    await db.execute("INSERT INTO customers (name, tier) VALUES ('canary', 'enterprise')")
    issued: str = await db.fetchval("SELECT issue_api_key('canary', 'test')")
    await db.close()
    return issued


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(http: aiohttp.ClientSession, stack: Stack, key: str, body: Any, **kind: str) -> tuple[int, str]:
    """One request; its status and the text of the answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **kind}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(f"{stack.url}/v1/inference", data=raw, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_no_log_ever_holds_a_key_or_a_prompt(
    home: Path, stack: Stack, key: str, http: aiohttp.ClientSession
) -> None:
    """200, 4xx, 5xx, a crash, a dead letter and a bad HTTP line: grep finds nothing of them in any log."""
    foreign = mint().text

    async def known() -> bool:
        return (await ask(http, stack, key, {"input": CANARY}))[0] == 200

    await eventually(known, "the key is known")
    bad = {"input": CANARY, "parameters": {CANARY: [[CANARY]]}}
    answers = [
        await ask(http, stack, key, {"input": CANARY}),
        await ask(http, stack, key, f'{{"input": "{CANARY}'.encode()),
        await ask(http, stack, key, bad),
        await ask(http, stack, foreign, {"input": CANARY}),
        await ask(http, stack, f"tl_{CANARY}", {"input": CANARY}),
        await ask(http, stack, key, {"input": CANARY, "model": CANARY}),
        await ask(http, stack, key, {"input": CANARY * 20_000}),
        await ask(http, stack, key, {"input": CANARY}, **{"Content-Encoding": "gzip"}),
        await ask(http, stack, key, {"input": f"raise {CANARY}"}),
        await ask(http, stack, key, {"input": f"crash {CANARY}"}),
    ]
    assert [status for status, _ in answers] == [200, 400, 400, 401, 401, 404, 413, 415, 422, 503]
    told = [text for status, text in answers if status not in {200, 400}]
    assert not any(CANARY in text or foreign in text or key in text for text in told)
    request_ids = [json.loads(text)["error"]["request_id"] for _, text in answers[-2:]]
    await stack.audited(request_ids)
    await parser_error(stack)

    lines = all_logs(home)
    assert b"model lost" in lines  # These are the logs in which it would stand.
    service_token = stack.read()["service_token"]
    leaked = [secret for secret in (CANARY, key, key[16:], foreign, service_token) if secret.encode() in lines]
    assert leaked == []
    assert await rows_with_the_canary(stack, request_ids) == []


def all_logs(home: Path) -> bytes:
    """Everything that any process of the stack has logged."""
    return b"".join(path.read_bytes() for path in home.rglob("*.log") if path.is_file())


async def parser_error(stack: Stack) -> None:
    """What the HTTP parser refuses must not be quoted either."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/inference?key={CANARY} HTTP/1.1\r\nHost: a\r\n{CANARY} : {CANARY}\r\n\r\n".encode())
    assert b" 400 " in await reader.readline()
    writer.close()


async def rows_with_the_canary(stack: Stack, request_ids: list[str]) -> list[str]:
    """The audit has sizes, never prompts."""
    rows = await stack.rows(request_ids)
    assert all(rows.values())
    return [i for i, found in rows.items() if any(CANARY in str(value) for row in found for value in row.values())]
