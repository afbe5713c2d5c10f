"""Faults of a stack before an engine with continuous batching: `tierlane chaos`, and single faults under many running requests.

Each client gets its own whole output, or an error if its stream had begun or the engine was away; each request has one row, and
afterwards no slot is taken, no batch is left, and nothing runs in the engine.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import psutil
import pytest
from engine.calls import output_text
from engine.process import RunningEngine, running_engine

from admin import NO_LIMITS, add_customer
from eventually import eventually
from ledger.postgres import asyncpg_dsn
from stack import Stack, free_port, start_stack
from tierlane_tools.chaos.checker.leftovers import read_leftovers

REPOSITORY = Path(__file__).parent.parent.parent
SEEDS = range(1, 11)
RATE = "30"
ENDS_WITHIN_S = 240

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(ENDS_WITHIN_S + 20)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_of_chaos_before_an_engine(tmp_path: Path, seed: int) -> None:
    """No chat or text is lost, doubled or crossed, and no slot stays taken; the output shows every violation."""
    result = tmp_path / "result.json"
    engine = ["--engine", str(REPOSITORY / "tools" / "bench" / "engine"), "--rate", RATE]
    command = [
        sys.executable,
        "-m",
        "tierlane",
        "chaos",
        *engine,
        "--seed",
        str(seed),
        "--json",
        str(result),
        "--quiet",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False, cwd=REPOSITORY)

    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(result.read_text())
    assert found["passed"]
    assert found["requests"] > 1_200
    assert {fault["name"] for fault in found["faults"] if not fault["error"]}


STREAMS, WHOLE, MORE, LEAVING = 32, 32, 16, 16
LEAST_TOKENS, MOST_TOKENS = 60, 200
FAULT_S, LEAVES_S = 1.0, 1.3
STOPPED_S, ENGINE_STOPPED_S, STORM_S = 3.0, 5.0, 10.0
PACE = {"step_ms": 10, "sequence_ms": 0.05, "slots": 96}  # 1.5 s for 100 tokens with 80 running.


class Outcome(NamedTuple):
    """What a client got. `text`: of all parts, `ended`: whether the response is whole, `code` that of its error."""

    number: int
    tokens: int
    stream: bool
    id: str
    text: str = ""
    ended: bool = False
    code: str = ""
    left_at: float = 0.0

    @property
    def is_own(self) -> bool:
        """Whether the text is the begin of the output for this prompt, or all of it if the response is whole."""
        expected = output_text(prompt_of(self.number), self.tokens)
        return self.text == expected if self.ended else expected.startswith(self.text)


def prompt_of(number: int) -> str:
    return f"prompt {number} é"


@dataclass
class Setup:
    """A stack of two workers before an engine; `restart` starts the engine again after a kill."""

    stack: Stack
    engine: RunningEngine
    key: str
    restart: Callable[[], RunningEngine]
    ids: list[str] = field(default_factory=list)


@asynccontextmanager
async def setup(home: Path) -> AsyncIterator[Setup]:
    port = free_port()
    with ExitStack() as up:

        def start() -> RunningEngine:
            return up.enter_context(running_engine(port, model="engine", **PACE))

        engine = start()
        stack = up.enter_context(start_stack(home, "--backend", f"{engine.backend}#engine", "--workers", "2"))
        await stack.healthy(2)
        customer = await add_customer(stack, "chats", "enterprise", **NO_LIMITS)
        yield Setup(stack, engine, customer.key, start)


async def ask(setup: Setup, number: int, *, stream: bool, leaves_s: float | None = None) -> Outcome:
    """Send one chat or text; leave after `leaves_s`."""
    chooser = random.Random(number)
    tokens, text = chooser.randint(LEAST_TOKENS, MOST_TOKENS), prompt_of(number)
    chat = chooser.random() < 0.5
    content: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": "engine", "max_tokens": tokens, "stream": stream, **content}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    parts: list[str] = []
    outcome = Outcome(number, tokens, stream, "")
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {setup.key}"}) as session:
        try:
            async with asyncio.timeout(leaves_s), session.post(setup.stack.url + path, json=body) as response:
                outcome = outcome._replace(id=response.headers.get("x-request-id", ""))
                async for line in response.content:
                    parts += [line.decode()]
        except TimeoutError:
            return _read(outcome, parts)._replace(left_at=time.monotonic())
        except aiohttp.ClientError as error:
            return _read(outcome, parts)._replace(code=type(error).__name__)
    return _read(outcome, parts)


def _read(outcome: Outcome, parts: list[str]) -> Outcome:
    raw = "".join(parts)
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    documents = (
        [json.loads(each) for each in events if each != "[DONE]"] if events else [json.loads(raw)] if raw else []
    )
    code = next((str(each["error"]["code"]) for each in documents if "error" in each), "")
    choices = [choice for each in documents for choice in each.get("choices", ())]
    text = "".join(c.get("text") or (c.get("message") or c.get("delta") or {}).get("content") or "" for c in choices)
    ended = bool(documents) and not code and (not events or events[-1] == "[DONE]")
    return outcome._replace(text=text, code=code, ended=ended)


async def all_running(setup: Setup) -> None:
    await eventually(lambda: setup.engine.state()["running"] > (STREAMS + WHOLE) / 2, "most of the requests run", 20.0)


Fault = Callable[[Setup], Awaitable[None]]


async def kill_worker(setup: Setup) -> None:
    os.kill(setup.stack.pids("worker")["worker-1"], signal.SIGKILL)


async def kill_model(setup: Setup) -> None:
    os.kill(setup.stack.pids("model")["worker-1-model"], signal.SIGKILL)


async def stop_worker(setup: Setup) -> None:
    process = psutil.Process(setup.stack.pids("worker")["worker-1"])
    process.suspend()
    await asyncio.sleep(STOPPED_S)
    process.resume()


async def kill_engine(setup: Setup) -> None:
    os.kill(setup.engine.pid, signal.SIGKILL)
    setup.engine = await asyncio.to_thread(setup.restart)


async def stop_engine(setup: Setup) -> None:
    process = psutil.Process(setup.engine.pid)
    process.suspend()
    await asyncio.sleep(ENGINE_STOPPED_S)
    process.resume()


async def refuse_all(setup: Setup) -> None:
    setup.engine.control(refuse=429, refuse_for_s=STORM_S)


async def reset_all(setup: Setup) -> None:
    setup.engine.control(reset_now=True)


FAULTS: dict[str, Fault] = {
    each.__name__: each
    for each in (kill_worker, kill_model, stop_worker, kill_engine, stop_engine, refuse_all, reset_all)
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_under_running_requests(tmp_path: Path, fault: str) -> None:
    """Whole responses are retried one by one and none is lost; a begun stream may end with an error; who leaves is cancelled."""
    async with setup(tmp_path / "s") as ready:
        began = time.monotonic()
        stay = [asyncio.create_task(ask(ready, n, stream=n % 2 == 0)) for n in range(STREAMS + WHOLE)]
        leave = [
            asyncio.create_task(ask(ready, 1000 + n, stream=n % 2 == 0, leaves_s=LEAVES_S)) for n in range(LEAVING)
        ]
        await all_running(ready)
        await asyncio.sleep(max(0.0, began + FAULT_S - time.monotonic()))
        injected = asyncio.create_task(FAULTS[fault](ready))
        await asyncio.sleep(0.1)  # The others are sent during the fault.
        stay += [asyncio.create_task(ask(ready, 2000 + n, stream=n % 2 == 0)) for n in range(MORE)]
        await injected
        outcomes, left = await asyncio.gather(*stay), await asyncio.gather(*leave)
        seconds = time.monotonic() - began
        rows = await settled(ready, STREAMS + WHOLE + MORE + LEAVING)
    by_id = {row["id"]: row for row in rows}
    codes = Counter(each.code for each in outcomes if each.code)
    attempts = Counter(row["attempts"] for row in rows)
    cancelled = [row for row in rows if row["error_code"] == "cancelled"]
    print(
        f"{fault}: {seconds:.1f} s, {sum(each.ended for each in outcomes)} whole, {dict(codes)}, attempts {dict(attempts)}"
    )
    print(f"{len(left)} left, cancelled (tokens, cost in ms): {charges(cancelled)}")

    assert len(by_id) == len(rows)
    assert [each for each in [*outcomes, *left] if not each.is_own] == []
    assert [each for each in outcomes if not (each.ended or each.code)] == []
    assert [each for each in outcomes if each.code and not (each.stream and each.text)] == []
    assert [each for each in outcomes if (by_id[each.id]["error_code"] or "") != each.code] == []
    streamed = {each.id for each in left if each.text}
    ended = [row for row in cancelled if row["id"] in streamed]
    assert [row for row in ended if not row["tokens_used"]] == []
    if fault not in ("kill_worker", "stop_worker"):  # The cost of a run is measured by its worker.
        assert [row for row in ended if not row["cost_ms"]] == []


def charges(rows: Iterable[asyncpg.Record]) -> list[tuple[int, int]]:
    """Tokens and cost in ms of each row; 0 for none."""
    return sorted((row["tokens_used"] or 0, round(row["cost_ms"] or 0)) for row in rows)


async def settled(setup: Setup, count: int) -> list[asyncpg.Record]:
    """The rows of all requests, once each has ended, nothing runs in the engine, and Redis has nothing of them any more."""

    async def idle() -> bool:
        left = await read_leftovers(setup.stack.redis_url)
        state = setup.engine.state()
        return left.settled and not state["running"] and not state["waiting"]

    await eventually(idle, "nothing is left in Redis and in the engine", 30.0)

    async def ended() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(asyncpg_dsn(setup.stack.info.database_url))
        try:
            rows = await connection.fetch("SELECT * FROM requests")
        finally:
            await connection.close()
        done = len(rows) >= count and all(row["status"] in ("completed", "failed") for row in rows)
        return rows if done else []

    rows = await eventually(ended, f"{count} closed rows", 30.0)
    assert len(rows) == count
    return rows


async def test_a_client_that_leaves_ends_its_run(tmp_path: Path) -> None:
    """The engine ends the run, streamed or not; the time until then is printed. Each is charged once, for what it used."""
    async with setup(tmp_path / "s") as ready:
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(40):
            stream = number % 2 == 0
            outcome = await ask(ready, number, stream=stream, leaves_s=0.4)
            ended = await eventually(lambda at=outcome.left_at: first_idle(ready.engine, at), "the run ends")  # type: ignore[misc]
            times[stream].append((ended - outcome.left_at) * 1000)
        rows = await settled(ready, 40)
    for stream, found in times.items():
        found.sort()
        kind = "streams" if stream else "whole responses"
        print(f"{kind}: run ended after {found[len(found) // 2]:.1f} ms (median), {found[-1]:.1f} ms (longest)")
    print(f"tokens and cost in ms: {charges(rows)}")

    assert {row["error_code"] for row in rows} == {"cancelled"}
    assert all(row["cost_ms"] for row in rows)


def first_idle(engine: RunningEngine, since: float) -> float:
    """When nothing ran in the engine for the first time after `since`; 0.0: not yet. Both clocks are monotonic."""
    return next((sample.at_s for sample in engine.history(since) if not sample.running), 0.0)
