"""A model that is too slow for the cap of a batch: a warning at the start, fast failures, and few restarts."""

import os
import re
import signal
import time
from pathlib import Path

import aiohttp

from eventually import eventually
from stack import Stack, start_stack

CAP_MS, DEADLINE_MS = 500, 1500
MODEL = """
import pathlib, time
def waits(texts):
    time.sleep(float(pathlib.Path(__file__).with_name("delay").read_text()))
    return [text[::-1] for text in texts]
"""
WARNING = (
    f"slow_model_of_test:waits takes [89]\\d\\d ms for a batch of one request, over TIERLANE_GPU_TIMEOUT_MS = {CAP_MS}"
)
CAPS = {"TIERLANE_GPU_TIMEOUT_MS": str(CAP_MS), "TIERLANE_TOTAL_REQUEST_MS": str(DEADLINE_MS)}


async def asked(session: aiohttp.ClientSession, stack: Stack, text: str) -> tuple[str, float]:
    """The output or the error code of one request, and its seconds."""
    began = time.monotonic()
    async with session.post(
        f"{stack.url}/v1/inference", json={"input": text}, headers=stack.headers("paid")
    ) as response:
        document = await response.json()
    return document.get("output") or document["error"]["code"], time.monotonic() - began


async def output(session: aiohttp.ClientSession, stack: Stack, text: str) -> str:
    """The output of a request that is served, else an empty string."""
    found, _ = await asked(session, stack, text)
    return found if found == text[::-1] else ""


async def test_a_slow_model(tmp_path: Path) -> None:
    """`up` names the model, its time and the setting. Requests fail at once while no trial batch ends in time, without a
    restart of the model process; a model that becomes slow later costs two restarts.
    """
    (tmp_path / "slow_model_of_test.py").write_text(MODEL)
    delay, log = tmp_path / "delay", tmp_path / "up.log"
    delay.write_text("0.8")
    backend = ("--backend", "slow_model_of_test:waits", "--workers", "1")
    with start_stack(tmp_path, *backend, environment=CAPS | {"PYTHONPATH": str(tmp_path)}) as stack:
        async with aiohttp.ClientSession() as session:
            first = stack.pids("model")
            rejected = [await asked(session, stack, f"n{n}") for n in range(3)]
            await eventually(lambda: re.search(WARNING, log.read_text()), "the warning")
            kept = stack.pids("model")
            delay.write_text("0")
            os.kill(stack.pids("worker")["worker-1"], signal.SIGTERM)  # Faster than to wait for the next trial batch.
            served = await eventually(lambda: output(session, stack, "abc"), "a request is served", 15.0)

            pids = [stack.pids("model")]
            delay.write_text("0.8")
            failed: list[tuple[str, float]] = []

            async def too_slow() -> bool:
                one = await asked(session, stack, f"m{len(failed)}")
                if one[0] != "no_capacity":  # The only model process is being restarted.
                    failed.append(one)
                    pids.append(stack.pids("model"))
                return one[0] == "model_too_slow"

            await eventually(too_slow, "the model is too slow", 30.0)
            rejected += [await asked(session, stack, f"o{n}") for n in range(3)]
            pids.append(stack.pids("model"))

    assert (served, kept) == ("cba", first)
    assert {code for code, _ in rejected} == {"model_too_slow"}
    assert max(seconds for _, seconds in rejected) < CAP_MS / 1000
    assert {code for code, _ in failed} <= {"gpu_timeout", "deadline_exceeded", "model_too_slow"}
    assert len({pid for each in pids for pid in each.values()}) <= 3
