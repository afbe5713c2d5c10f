"""The cost of a request to a bare echo server, with which that of the stack is compared.

It depends on the machine, its load and the number of connections, so the plan's load runs on bare echo processes just
before the run.
"""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex

from tierlane_local.stack_file import ProcessInfo
from tierlane_local.up.data_dir import held_port
from tierlane_tools.bench.load import BenchLoad, Phase, Traffic
from tierlane_tools.bench.measurement.resources import cpu_between, read_cpu
from tierlane_tools.bench.measurement.statistics import TierStatistics, new_tallies
from tierlane_tools.bench.plan.inputs import TAG_CHARACTERS, Inputs
from tierlane_tools.bench.plan.plan import BenchPlan, TargetAddress
from tierlane_tools.bench.verification.output_check import OutputCheck, Verify

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


def echo_seconds(plan: BenchPlan) -> float:
    """How long `measure_echo` takes, about."""
    return WARMUP_S + min(MOST_S, plan.duration)


async def measure_echo(plan: BenchPlan, keys: Sequence[Sequence[str]], processes: int) -> EchoResult | None:
    """Start, load and stop so many echo processes; None when they do not start."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port(HOST, 0))
        try:
            async with asyncio.timeout(START_S):
                started = [await stack.enter_async_context(_started(port)) for _ in range(processes)]
        except TimeoutError:
            return None
        infos = [ProcessInfo("echo", f"echo-{number}", process.pid) for number, process in enumerate(started)]
        inputs = Inputs(token_hex(TAG_CHARACTERS // 2), plan.filler)
        end_s = WARMUP_S + min(MOST_S, plan.duration)
        phases = [Phase(until_s, new_tallies(plan.mix.tiers, {})) for until_s in (WARMUP_S, end_s)]
        address = TargetAddress(HOST, port, f"{HOST}:{port}", "/v1/inference")
        load = Traffic(plan, keys, inputs, OutputCheck(Verify.OFF, inputs)).load(address, phases)
        load.begin()
        finished = asyncio.create_task(load.finish(), name="echo")
        try:
            await _until(load, WARMUP_S)
            before, answers, began_s = await asyncio.to_thread(read_cpu, infos), load.answers, time.monotonic()
            await _until(load, end_s)
            answers, window_s = load.answers - answers, time.monotonic() - began_s
            used = cpu_between(before, await asyncio.to_thread(read_cpu, infos))
        finally:
            load.stop()
            await finished
    whole = TierStatistics.merged("echo", phases[1].tallies)
    quantiles = [whole.latency.quantile(share) for share in (0.5, 0.99)]
    median_ms, p99_ms = (None if value is None else round(value * 1000, 4) for value in quantiles)
    cpu_us = sum(used.by_role.values()) * 1e6 / answers if answers else 0.0
    return EchoResult(processes, answers / window_s, round(cpu_us, 2), median_ms, p99_ms, whole.failures)


@asynccontextmanager
async def _started(port: int) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "tierlane_tools.bench.measurement.echo_server", str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        if process.stdout:
            await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until(load: BenchLoad, at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - load.elapsed_s()))
