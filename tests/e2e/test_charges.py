"""What was delivered is charged once: audit, limit, quotas, budget and bill agree, whatever an engine sends and however it ends."""

import asyncio
import csv
import io
import json
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from admin import NewCustomer, add_customer, announced, sql
from endpoint_stand_in import StandIn, serving
from eventually import eventually
from integration.admin_fixtures import Admin
from scheduler.redis_client.connections import command_client
from stack import Stack, start_stack

MOST_TOKENS = 2**30 - 1
PER_GPU_S, PER_1000 = Decimal("0.5"), Decimal("0.001")
"""Prices in USD: whole billionths for a microsecond and a token, so that nothing is rounded."""
QUOTAS = ("999999999999999 tokens/day", "99999 gpu-h/day", "999999 usd/day")
LIMITS = {"tokens_per_minute": 10**11, "requests_per_second": 10**4, "burst": 10**4, "max_concurrency": 100}
MEDIA_TYPES = ("text/event-stream", "text/plain", "application/octet-stream")
"""Of streams: some servers name another one, or none."""
HOLD_S = 10.0
DOCUMENT_TOKENS = 20
"""Of the members around a prompt, which a gateway counts as input."""
ARRIVES_S = 0.15
"""In which the worker has read what a client does not see, such as counts of tokens."""
REFUSALS = ("400", "401", "404", "413", "422", "200 junk")
ONCE = ("429 once", "503 once")
"""Refusals of a first call; the next is answered."""
ENDS = ("done", "done", "done without reason", "eof", "eof without reason", "reset", "error event", "leave", *REFUSALS)


class Step(NamedTuple):
    """One event of an engine: new text of a kind ("" for none), and its count of tokens, which may be none."""

    kind: str
    text: str
    usage: Any = None


@dataclass(frozen=True)
class Script:
    """An engine's response. `end`: see ENDS, or `deadline`: it is silent until its client has left; `late`: of the last event."""

    steps: tuple[Step, ...]
    end: str = "done"
    late: Any = None
    chat: bool = True
    stream: bool = True
    seen: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    """Set once the client has received the text."""

    @property
    def route(self) -> str:
        return "chat/completions" if self.chat else "completions"

    @property
    def texts(self) -> str:
        return "".join(step.text for step in self.steps)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events before the end."""
        for step in self.steps:
            document = {"choices": [self._choice(step)]}
            yield document | ({"usage": step.usage} if step.usage is not None else {})

    def _choice(self, step: Step) -> dict[str, Any]:
        if not self.chat:
            return {"index": 0, "text": step.text, "finish_reason": ""}  # As of some servers, until the end.
        delta: dict[str, Any] = {"role": "assistant"} if not step.kind else {step.kind: step.text}
        if step.kind == "tool_calls":
            delta = {"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": step.text}}]}
        return {"index": 0, "delta": delta, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The same output without a stream."""
        usage = {} if self.late is None else {"usage": self.late}
        if not self.chat:
            return {"choices": [{"index": 0, "text": self.texts, "finish_reason": "stop"}]} | usage
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for step in self.steps:
            if step.kind == "tool_calls":
                call = {"id": "c", "type": "function", "function": {"arguments": step.text}}
                message.setdefault("tool_calls", []).append(call)
            elif step.kind:
                message[step.kind] = (message.get(step.kind) or "") + step.text
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]} | usage


def tokens_of(text_bytes: int) -> int:
    return math.ceil(text_bytes / 4)


def counts(usage: Any) -> tuple[int, int]:
    """Input and output as an engine counts them; what is no number of tokens is none."""
    found = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    read, written = (int(each) if isinstance(each, int | float) and each > 0 else 0 for each in found)
    read = min(read, MOST_TOKENS)
    return read, min(written, MOST_TOKENS - read)


def charge(script: Script, prompt: str) -> int:
    """The tokens that are charged: the last count, and the text that was delivered after it; none of a refusal."""
    if script.end in REFUSALS:
        return 0
    completes = script.end in ("done", "done without reason", "eof", *ONCE)
    size = later = read = written = 0
    steps = script.steps if script.stream else (Step("content", script.texts),)
    for step in (*steps, *([Step("", "", script.late)] if completes and script.late is not None else [])):
        size, later = size + len(step.text.encode()), later + len(step.text.encode())
        if any(found := counts(step.usage)):
            (read, written), later = found, 0
    written += tokens_of(later if written else size)
    if not size and not completes:
        return 0
    return min((read or tokens_of(len(prompt.encode()))) + written, MOST_TOKENS)


class ScriptedEngine(StandIn):
    """Answers by the script of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, Script] = {}
        self.refused: set[str] = set()

    async def _answer(self, request: web.Request, route: str, body: dict[str, Any]) -> web.StreamResponse:
        prompt = str(body["prompt"] if route == "completions" else body["messages"][-1]["content"])
        script = self.scripts[prompt]
        if script.end in REFUSALS or (script.end in ONCE and prompt not in self.refused):
            self.refused.add(prompt)
            status = int(script.end.split()[0])
            if status == 200:
                return web.Response(text="<html>Blocked.</html>", content_type="text/html")
            return web.json_response({"error": {"message": "No."}}, status=status, headers={"Retry-After": "0.05"})
        if not script.stream:
            return web.json_response(script.whole())
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPES[len(self.scripts) % len(MEDIA_TYPES)]})
        await response.prepare(request)
        for event in script.events():
            await response.write(b"data: %b\n\n" % json.dumps(event).encode())
        await self._end(request, response, script)
        return response

    async def _end(self, request: web.Request, response: web.StreamResponse, script: Script) -> None:
        if script.end in ("reset", "error event", "leave", "deadline"):
            await asyncio.to_thread(script.seen.wait, HOLD_S)
            await asyncio.sleep(ARRIVES_S)
        if script.end in ("leave", "deadline"):
            await asyncio.sleep(HOLD_S)  # Cancelled as soon as the connection is closed.
        elif script.end == "reset":
            assert request.transport is not None
            request.transport.abort()
        elif script.end == "error event":
            await response.write(b'data: {"error": {"code": 500, "message": "It broke."}}\n\n')
        else:
            await self._complete(response, script)

    async def _complete(self, response: web.StreamResponse, script: Script) -> None:
        if not script.end.endswith("without reason"):
            ended = {"index": 0, "finish_reason": "stop"} | ({"delta": {}} if script.chat else {"text": ""})
            await response.write(b"data: %b\n\n" % json.dumps({"choices": [ended]}).encode())
        if script.late is not None and script.end != "eof without reason":
            await response.write(b"data: %b\n\n" % json.dumps({"choices": None, "usage": script.late}).encode())
        if not script.end.startswith("eof"):
            await response.write(b"data: [DONE]\n\n")


class Spent(NamedTuple):
    """What a customer has used: the level of its token bucket with its time and rate, and of its quotas."""

    level: float
    at_us: int
    rate: float
    tokens: int
    gpu_us: int
    nano_usd: int


@dataclass
class Charges:
    """One customer of a stack, with requests and what each cost."""

    stack: Stack
    redis: Redis
    session: aiohttp.ClientSession
    engine: ScriptedEngine
    customer: NewCustomer
    model: str
    tokens: dict[str, int] = field(default_factory=dict)
    """By request id: what was charged."""

    async def spent(self) -> Spent:
        """Once no request is open: their charges are then final."""

        async def ended() -> bool:
            return await self.redis.zcard(f"rl:leases:{self.customer.id}") == 0

        await eventually(ended, "no request is open", 20.0)
        row = {
            name.decode(): value
            for name, value in (await self.redis.hgetall(f"rl:customer:{self.customer.id}")).items()
        }
        used = [int(row.get(f"q:1day:{unit}", b"0 0").split()[1]) for unit in ("tokens", "gpu", "usd")]
        level, at_us, rate = (float(row.get(name, 0)) for name in ("budget", "at", "pace"))
        return Spent(level, int(at_us), rate / 60, *used)

    async def run(self, script: Script) -> int:
        """Send one request; the tokens that limit and quota were charged for it, which must agree."""
        prompt = f"{'p' * 40} {len(self.engine.scripts)}"
        self.engine.scripts[prompt] = script
        before = await self.spent()
        request_id = await self.send(script, prompt)
        after = await self.spent()
        refilled = before.level + (after.at_us - before.at_us) / 1e6 * before.rate
        of_limit = min(LIMITS["tokens_per_minute"], refilled) - after.level
        of_quota = after.tokens - before.tokens
        assert round(of_limit) == of_quota
        self.tokens[request_id] = of_quota
        return charge(script, prompt)

    async def send(self, script: Script, prompt: str) -> str:
        """Send one request, and read or leave its response; its id."""
        body: dict[str, Any] = {"model": self.model, "stream": script.stream, "max_tokens": 1000}
        body |= {"messages": [{"role": "user", "content": prompt}]} if script.chat else {"prompt": prompt}
        url, headers = f"{self.stack.url}/v1/{script.route}", self.customer.headers
        async with self.session.post(url, json=body, headers=headers) as response:
            left = len(script.texts)
            if not left:
                script.seen.set()
            async for text in delivered(response, chat=script.chat):
                left -= len(text)
                if left <= 0:
                    script.seen.set()
                    if script.end == "leave":
                        break
            if script.end == "leave" and not script.texts:
                await asyncio.sleep(ARRIVES_S)
            if script.end == "leave":
                response.close()
            return str(response.headers["x-request-id"])


async def delivered(response: aiohttp.ClientResponse, *, chat: bool) -> AsyncIterator[str]:
    """The texts of a stream as they arrive."""
    try:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices") or ():
                delta = choice.get("delta") or {}
                calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
                texts = (
                    delta.get("content"),
                    delta.get("reasoning_content"),
                    *(call.get("arguments") for call in calls),
                )
                yield "".join(text or "" for text in texts) if chat else choice.get("text") or ""
    except aiohttp.ClientPayloadError:
        pass  # A stream that cannot be finished.


COUNT = st.one_of(st.integers(0, 40), st.sampled_from([8.0, 0, 10**10, -3, None, "7"]))
USAGE = st.one_of(
    st.none(),
    st.fixed_dictionaries({"prompt_tokens": st.integers(1, 40), "completion_tokens": st.integers(1, 40)}),
    st.fixed_dictionaries({"prompt_tokens": COUNT, "completion_tokens": COUNT}),
    st.just({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}),
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.builds(str.__mul__, st.sampled_from("aé漢😀"), st.integers(1, 5000)),
)
STEP = st.one_of(
    st.builds(Step, st.sampled_from(["content", "content", "reasoning_content", "tool_calls"]), TEXT, USAGE),
    st.builds(Step, st.just(""), st.just(""), USAGE),
)
SCRIPT = st.builds(
    Script,
    st.lists(STEP, max_size=6).map(tuple),
    st.sampled_from(ENDS),
    USAGE,
    st.booleans(),
    st.sampled_from([True, True, True, False]),
).filter(lambda script: script.stream or script.end in ("done", *REFUSALS))
WORDS = Step("content", "word " * 40)


def test_what_was_delivered_is_charged_once(tmp_path: Path) -> None:
    """The last count of an engine, else the delivered text. Beside it, streams of a neighbour that end at their deadline."""
    engine = ScriptedEngine()
    environment = {"TIERLANE_TOTAL_REQUEST_MS": "3000", "TIERLANE_GPU_TIMEOUT_MS": "2900"}
    with (
        serving(engine),
        start_stack(tmp_path, "--backend", f"openai:{engine.url}", "--workers", "1", environment=environment) as stack,
        asyncio.Runner() as runner,
    ):
        runner.run(stack.healthy(1))
        mine, neighbour = runner.run(prepared(stack, engine))

        @settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
        @given(SCRIPT)
        @example(Script((Step("", "", {"prompt_tokens": 7, "completion_tokens": 0}),), "leave"))
        @example(Script((Step("", ""),), "reset"))
        @example(Script((WORDS,), "deadline"))
        @example(Script((Step("", ""),), "deadline"))
        def run(script: Script) -> None:
            script.seen.clear()
            expected = runner.run(mine.run(script))
            assert list(mine.tokens.values())[-1] == expected

        loop, stop = runner.get_loop(), asyncio.Event()
        beside, began = loop.create_task(streams(neighbour, stop)), loop.time()
        run()
        stop.set()
        runner.run(ended(beside))
        for end in ONCE:
            runner.run(refused_once(mine, end))
        runner.run(lost(mine))
        elapsed_ms = (loop.time() - began) * 1000
        costs = [runner.run(agree(each)) for each in (mine, neighbour)]
        assert sum(costs) <= elapsed_ms
        runner.run(closed(mine))


async def prepared(stack: Stack, engine: ScriptedEngine) -> tuple[Charges, Charges]:
    """Two customers with a limit of tokens, and a quota of each unit; one request of each has begun its bucket."""
    price = "INSERT INTO prices SELECT name, now() - interval '1 day', $1, $2 FROM models"
    await sql(stack, price, PER_GPU_S, PER_1000)
    ((model,),) = await sql(stack, "SELECT name FROM models")
    redis, session = command_client(stack.redis_url), aiohttp.ClientSession()
    found = []
    for name in ("mine", "neighbour"):
        customer = await add_customer(stack, name, "paid", **LIMITS)
        await sql(stack, "INSERT INTO quotas (customer_id, quota) SELECT $1, unnest($2::text[])", customer.id, QUOTAS)
        each = Charges(stack, redis, session, engine, customer, model)

        async def metered(customer: NewCustomer = customer) -> bool:
            return "day-usd" in (await announced(stack.url, customer.headers)).get("RateLimit-Policy", "")

        await eventually(metered, "the quotas are in force", 20.0)
        engine.scripts[name] = Script((WORDS,))
        each.tokens[await each.send(engine.scripts[name], name)] = charge(engine.scripts[name], name)
        found.append(each)
    return found[0], found[1]


async def streams(neighbour: Charges, stop: asyncio.Event) -> None:
    """Streams that end at their deadline, one after the other."""
    while not stop.is_set():
        await neighbour.run(Script((WORDS,), "deadline"))


async def ended(task: "asyncio.Task[None]") -> None:
    await task


async def refused_once(mine: Charges, end: str) -> None:
    """A request that ran again after a refusal is charged once."""
    assert await mine.run(Script((WORDS,), end)) == list(mine.tokens.values())[-1]


async def lost(mine: Charges) -> None:
    """A stream whose worker's model process is killed is charged what its client received."""
    script = Script((WORDS,), "deadline")
    running = asyncio.create_task(mine.run(script))
    await eventually(script.seen.is_set, "the client has received the text")
    for pid in mine.stack.pids("model").values():
        os.kill(pid, signal.SIGKILL)
    expected = await running
    assert expected <= list(mine.tokens.values())[-1] <= expected + DOCUMENT_TOKENS


async def agree(each: Charges) -> float:
    """Audit, quotas, budget, bill and the account's page have the same sums; returns the GPU time in ms."""
    rows, spent = await each.stack.audited(list(each.tokens)), await each.spent()
    charged = {request_id: row["tokens_used"] or 0 for request_id, row in rows.items()}
    assert charged == each.tokens
    tokens, costs = sum(charged.values()), [row["cost_ms"] or 0.0 for row in rows.values()]
    gpu_us = sum(round(cost * 1000) for cost in costs)
    usd = Decimal(gpu_us) / 10**6 * PER_GPU_S + Decimal(tokens) / 1000 * PER_1000
    assert (spent.tokens, spent.gpu_us, spent.nano_usd) == (tokens, gpu_us, int(usd * 10**9))
    days = [(datetime.now(UTC) + timedelta(days)).date().isoformat() for days in (-1, 1)]
    export = ("usage", "export", "--from", days[0], "--to", days[1], "--by", "total")
    bill = csv.DictReader(io.StringIO(await Admin(each.stack.info.database_url).done(*export)))
    (line,) = [line for line in bill if line["customer_id"] == each.customer.id]
    billed = (int(line["requests"]), int(line["tokens"]), Decimal(line["gpu_s"]), Decimal(line["cost_usd"]))
    assert billed == (len(rows), tokens, Decimal(gpu_us) / 10**6, usd)
    async with each.session.get(f"{each.stack.url}/v1/me", headers=each.customer.headers) as response:
        account = await response.json()
    (left,) = [quota for quota in account["remaining"]["quotas"] if quota["unit"] == "tokens"]
    assert (account["usage"]["tokens_used"], left["remaining"]) == (tokens, left["amount"] - tokens)
    return sum(costs)


async def closed(mine: Charges) -> None:
    await mine.session.close()
    await mine.redis.aclose()
