"""What a request costs where nothing is done with it: the plan's load on bare echo processes, just before the run.

The cost of a request depends on the machine, its load and the number of connections, so it says something only beside
a floor that was measured in the same minute.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex

from tierlane.bench.inputs import TAG_CHARACTERS, Inputs
from tierlane.bench.load import Load, Phase
from tierlane.bench.output_check import OutputCheck, Verify
from tierlane.bench.plan import Address, Plan
from tierlane.bench.resources import cpu_between, read_cpu
from tierlane.bench.stack_info import ProcessInfo
from tierlane.bench.tally import TierTally, new_tallies
from tierlane.bench.traffic import Traffic
from tierlane.up.ports import held_port

HOST = "127.0.0.1"
WARMUP_S = 1.0
MOST_S = 5.0
START_S = 20.0


@dataclass(frozen=True)
class EchoResult:
    """What the echo did. CPU in microseconds a request."""

    processes: int
    rate: float
    cpu_us: float
    median_ms: float | None
    p99_ms: float | None
    failed: int


async def measure_echo(plan: Plan, keys: Sequence[Sequence[str]], processes: int) -> EchoResult | None:
    """Start, load and stop so many echo processes; None when they do not start."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port(HOST, 0))
        try:
            async with asyncio.timeout(START_S):
                started = [await stack.enter_async_context(_started(port)) for _ in range(processes)]
        except TimeoutError:
            return None
        infos = [ProcessInfo("echo", f"echo-{number}", process.pid) for number, process in enumerate(started)]
        return await _measured(plan, Address(HOST, port, f"{HOST}:{port}", "/v1/inference"), keys, infos)


@asynccontextmanager
async def _started(port: int) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "tierlane.bench.echo_server", str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        if process.stdout:
            await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _measured(
    plan: Plan, address: Address, keys: Sequence[Sequence[str]], infos: Sequence[ProcessInfo]
) -> EchoResult:
    inputs = Inputs(token_hex(TAG_CHARACTERS // 2), plan.filler)
    seconds = min(MOST_S, plan.duration)
    phases = [Phase(end_s, new_tallies(plan.mix.tiers, {})) for end_s in (WARMUP_S, WARMUP_S + seconds)]
    load = Traffic(plan, keys, inputs, OutputCheck(Verify.OFF, inputs)).load(address, phases)
    load.begin()
    finished = asyncio.create_task(load.finish(), name="echo")
    try:
        await _until(load, WARMUP_S)
        before, answers, began_s = await asyncio.to_thread(read_cpu, infos), load.answers, time.monotonic()
        await _until(load, WARMUP_S + seconds)
        answers, window_s = load.answers - answers, time.monotonic() - began_s
        used = cpu_between(before, await asyncio.to_thread(read_cpu, infos))
    finally:
        load.stop()
        await finished
    return _result(len(infos), answers, window_s, sum(used.by_role.values()), phases[1].tallies)


async def _until(load: Load, at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - load.elapsed_s()))


def _result(processes: int, answers: int, window_s: float, cpu_s: float, tallies: Sequence[TierTally]) -> EchoResult:
    whole = TierTally.merged("echo", tallies)
    quantiles = [whole.latency.quantile(share) for share in (0.5, 0.99)]
    median_ms, p99_ms = (None if value is None else round(value * 1000, 4) for value in quantiles)
    cpu_us = cpu_s * 1e6 / answers if answers else 0.0
    return EchoResult(processes, answers / window_s, round(cpu_us, 2), median_ms, p99_ms, whole.failures)
