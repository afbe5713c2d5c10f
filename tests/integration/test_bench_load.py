"""`tierlane bench` against a fake gateway: open and closed loop, exact counts of every outcome, and what is written."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest
from aiohttp import web

from bench_stand_in import (
    KEYS,
    StandIn,
    bench,
    error_answer,
    read_document,
    reversed_answer,
    stack_file,
    stand_in,
    write_stack,
)
from tierlane_tools.bench.measurement.statistics import UnansweredCause

__all__ = ["stack_file", "stand_in"]


async def test_a_correct_run(stand_in: StandIn, stack_file: Path) -> None:
    """Every request is sent once with its tier's key and verified; the warm-up is counted apart."""
    result = await bench(stand_in, stack_file, warmup="0.25")

    assert (result["passed"], result["faults"]) == (True, [])
    assert [result[name] for name in ("scheduled", "sent", "answered", "completed", "good")] == [100] * 5
    assert (result["failed"], result["unanswered"], result["crossed"], result["verified"]) == (0, 0, 0, 150)
    assert (result["warmup"]["completed"], stand_in.number) == (50, 150)
    assert sum(result["tiers"][tier]["completed"] for tier in KEYS) == 100
    assert set(stand_in.keys) == set(KEYS.values())
    assert (result["settings"]["verify"], result["echo"], result["cpu_over_echo"]) == ("reversed", None, None)


async def test_errors_are_counted_by_status_and_code(stand_in: StandIn, stack_file: Path) -> None:
    """They fail the run only above the largest error rate."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number % 10 == 0:
            return error_answer(429, "rate_limit_exceeded")
        if number % 10 == 1:
            return error_answer(503, "queue_full")
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, max_error_rate="20%")

    assert sorted((each["status"], each["code"], each["count"]) for each in result["errors"]) == [
        (429, "rate_limit_exceeded", 10),
        (503, "queue_full", 10),
    ]
    assert (result["completed"], result["failed"], result["error_rate"]) == (80, 20, pytest.approx(0.2))
    assert result["passed"]
    stand_in.number = 0
    assert not (await bench(stand_in, stack_file, max_error_rate="5%"))["passed"]


async def test_a_timeout(stand_in: StandIn, stack_file: Path) -> None:
    """The run ends although one response never comes, and does not pass."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 7:
            await asyncio.Event().wait()
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, timeout="0.3")

    assert (result["completed"], result["unanswered"], result["passed"]) == (99, 1, False)
    assert result["unanswered_by_cause"] == {UnansweredCause.TIMEOUT: 1}


async def test_closed_connections(stand_in: StandIn, stack_file: Path) -> None:
    """A connection that is closed under a request costs that one; `Connection: close` costs none."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        answer = reversed_answer(text)
        if number == 3 and request.transport:
            request.transport.close()
        if number == 50:
            answer.force_close()
        return answer

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="1")

    assert (result["completed"], result["unanswered"]) == (99, 1)
    assert result["unanswered_by_cause"] == {UnansweredCause.CLOSED: 1}
    assert len(stand_in.connections) == 3


async def test_crossed_answers(stand_in: StandIn, stack_file: Path) -> None:
    """Two requests that get each other's output are two crossed answers, and the run does not pass."""
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    second: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 10:
            first.set_result(text)
            text = await second
        elif number == 11:
            second.set_result(text)
            text = await first
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file)

    assert (result["crossed"], result["verified"], result["completed"], result["passed"]) == (2, 98, 100, False)


async def test_latency_counts_from_the_due_time(stand_in: StandIn, stack_file: Path) -> None:
    """With one connection, every request that is due during a stall of the server is late."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 1:
            await asyncio.sleep(0.3)  # The stall.
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="1")

    assert (len(stand_in.connections), result["completed"]) == (1, 100)
    assert result["max_e2el_ms"] > 290
    assert result["median_e2el_ms"] > 30
    assert result["waited_for_connection"] >= 50


async def test_requests_without_a_connection(stand_in: StandIn, stack_file: Path) -> None:
    """With all connections in use the others end unsent at their timeout; each request has exactly one outcome."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="4", timeout="0.3")
    causes = result["unanswered_by_cause"]

    assert set(causes) == {UnansweredCause.NOT_SENT, UnansweredCause.TIMEOUT}
    assert sum(causes.values()) == result["scheduled"] == result["unanswered"] == 100
    assert causes[UnansweredCause.TIMEOUT] == result["sent"] >= 4
    assert len(stand_in.connections) <= result["sent"]


@pytest.mark.parametrize("mode", ["open", "closed"])
async def test_refused_connections(mode: str, stand_in: StandIn, stack_file: Path) -> None:
    """The run ends and does not pass; a closed loop pauses after each refusal."""
    stand_in.url = "http://127.0.0.1:1"
    result = await bench(stand_in, stack_file, mode=mode, connections="4")

    assert (result["sent"], result["completed"], result["passed"]) == (0, 0, False)
    assert result["unanswered_by_cause"] == {UnansweredCause.CONNECT: result["scheduled"]}
    assert mode == "open" or 4 <= result["scheduled"] <= 4 * 6


async def test_a_closed_loop(stand_in: StandIn, stack_file: Path) -> None:
    """One request is open on each connection; a lost connection is replaced, and requests open at the end are awaited."""
    open_requests = most = 0

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        nonlocal open_requests, most
        open_requests += 1
        most = max(most, open_requests)
        if number == 3 and request.transport:
            request.transport.close()
        try:
            await asyncio.sleep(0.01)  # So that requests overlap.
        finally:
            open_requests -= 1
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, mode="closed", connections="5")

    assert (most, len(stand_in.connections)) == (5, 6)
    assert result["unanswered_by_cause"] == {UnansweredCause.CLOSED: 1}
    assert result["completed"] + 1 == result["scheduled"] == stand_in.number > 5 * 5


async def test_an_echo_is_measured_beside_the_run(stand_in: StandIn, stack_file: Path) -> None:
    """As many echo processes as there are gateways, under the same load."""
    names = ("gateway-1", "gateway-2")
    write_stack(stack_file, processes=[{"role": "gateway", "name": name, "pid": os.getpid()} for name in names])
    result = await bench(stand_in, stack_file, mode="closed", connections="4", duration="1")
    echo = result["echo"]

    assert (echo["processes"], echo["failed"]) == (2, 0)
    assert min(echo["cpu_us"], echo["median_ms"], result["rss_mb"]["gateway"]["begin"]) > 0
    assert echo["rate"] > 100
    assert result["cpu_over_echo"] == pytest.approx(
        result["server_cpu_seconds_per_1000"] * 1000 / echo["cpu_us"], abs=0.001
    )


async def started(stand_in: StandIn, stack_file: Path, *argv: str) -> asyncio.subprocess.Process:
    arguments = ["-m", "tierlane", "bench", "--stack", str(stack_file), "--url", stand_in.url, "--warmup", "0.1", *argv]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--slo", "all.max=1us"), 1)])
async def test_the_command(
    stand_in: StandIn, stack_file: Path, tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    """The exit code is 1 for a missed objective; the document has stable names and no key. Progress is on standard error."""
    write_stack(stack_file, processes=[{"role": "gateway", "name": "gateway-1", "pid": os.getpid()}])
    path = tmp_path / "out.json"
    process = await started(stand_in, stack_file, "--duration", "0.5", "--rate", "400", "--json", str(path), *options)
    output, errors = await process.communicate()
    written = read_document(path)

    assert process.returncode == code
    assert [line.partition(" ")[0] for line in errors.decode().splitlines()] == ["Sending", "First"]
    assert min(written["cpu_seconds"]["gateway"], written["cpu_seconds"]["generator"]) > 0
    assert written["settings"]["rate"] == 400
    assert not any(key in output.decode() + str(written) for key in KEYS.values())
    for name in ("request_throughput", "mean_e2el_ms", "median_e2el_ms", "p99.9_e2el_ms"):
        assert written[name] > 0
        assert name in written["tiers"]["paid"]


async def test_an_interrupted_run_is_reported(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the run at once with its report so far, and exit code 1."""
    arrived = asyncio.Event()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 20:
            arrived.set()
        return reversed_answer(text)

    stand_in.behaviour = behave
    path = tmp_path / "out.json"
    process = await started(stand_in, stack_file, "--json", str(path))
    try:
        async with asyncio.timeout(20):
            await arrived.wait()
            process.send_signal(2)
            await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    assert process.returncode == 1
    assert read_document(path)["faults"]
