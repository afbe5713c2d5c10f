"""An LLM engine with continuous batching as the backend of a chaos stack, and the faults that it causes by itself.

The engine is another program, in a checkout `tools/bench/engine`. It serves OpenAI's API for texts and chats, takes `POST /control`
(`refuse`, `refuse_above`, `reset_share`, `reset_now`) and returns its `running` and `waiting` requests there. The text of an
output depends on the prompt and its length alone: see `output_text`.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from zlib import crc32

import aiohttp
import msgspec

from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import FaultImpossible, StackTargets

MODEL = "engine"
PACE = ("--step-ms", "4", "--sequence-ms", "0.05", "--slots", "32")  # 200 tokens in 1 s.
TOO_BUSY = 429
CONTROL_S = 2.0
HEAL_WITHIN_S, HEAL_POLL_S = 15.0, 0.1


def engine_command(program: Path, port: int) -> list[str]:
    """The command line of the engine."""
    return [sys.executable, str(program), "--port", str(port), "--model", MODEL, *PACE]


def output_text(prompt: str, tokens: int) -> str:
    """The output for a prompt, for a chat its last message: a checksum of it, then the numbers of the other tokens."""
    return "".join((f"{crc32(prompt.encode()):08x}", *(f" {number}" for number in range(2, tokens + 1))))


class EngineState(msgspec.Struct):
    """Requests in the engine."""

    running: int
    waiting: int


async def control(url: str, **change: object) -> EngineState:
    """Change the engine; returns its state. Raises FaultImpossible if it does not respond."""
    timeout = aiohttp.ClientTimeout(total=CONTROL_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/control", json=change) as reply,
        ):
            return msgspec.json.decode(await reply.read(), type=EngineState)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise FaultImpossible(f"The engine does not respond: {type(error).__name__}.") from None


@asynccontextmanager
async def reset(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Reset the connections of all calls."""
    del fault
    yield f"{(await control(targets.engine_url, reset_now=True)).running} calls"


@asynccontextmanager
async def resets(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Reset a part of the new streams at a random token."""
    await control(targets.engine_url, reset_share=fault.parameters["share"])
    try:
        yield f"{fault.parameters['share']:.0%} of new streams"
    finally:
        await _undo(targets.engine_url, reset_share=0.0)


@asynccontextmanager
async def busy(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Refuse new calls, all of them or those above a number."""
    above = round(fault.parameters["above"])
    await control(targets.engine_url, refuse=TOO_BUSY, refuse_above=above)
    try:
        yield f"above {above} calls" if above >= 0 else "all calls"
    finally:
        await _undo(targets.engine_url, refuse=0)


async def _undo(url: str, **change: object) -> None:
    """Change the engine back once it responds: another fault may have stopped or killed it."""
    deadline = time.monotonic() + HEAL_WITHIN_S
    while True:
        try:
            await control(url, **change)
            return
        except FaultImpossible:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEAL_POLL_S)
