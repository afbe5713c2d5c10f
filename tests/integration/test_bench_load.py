"""The load against a stand-in for the gateway that misbehaves on purpose: every count must be exact."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec
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
from tierlane.bench.statistics import UnansweredCause

__all__ = ["stack_file", "stand_in"]


async def test_a_good_run_is_counted_exactly(stand_in: StandIn, stack_file: Path) -> None:
    """Every request is sent once with its tier's key, answered, verified, and counted under its tier."""
    result = await bench(stand_in, stack_file)

    assert (result["passed"], result["faults"]) == (True, [])
    assert [result[name] for name in ("scheduled", "sent", "answered", "completed", "good")] == [100] * 5
    assert (result["failed"], result["unanswered"], result["crossed"], result["verified"]) == (0, 0, 0, 100)
    assert stand_in.number == 100
    assert {tier: result["tiers"][tier]["completed"] for tier in KEYS} == {
        tier: stand_in.keys.count(key) for tier, key in KEYS.items()
    }
    assert result["settings"]["verify"] == "reversed"


async def test_the_warmup_is_sent_but_not_measured(stand_in: StandIn, stack_file: Path) -> None:
    """Requests due before the window are counted apart."""
    result = await bench(stand_in, stack_file, warmup="0.25")

    assert (result["warmup"]["completed"], result["completed"], stand_in.number) == (50, 100, 150)


async def test_errors_are_counted_by_status_and_code(stand_in: StandIn, stack_file: Path) -> None:
    """A refusal is an answer: no fault by itself, but no success."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number % 10 == 0:
            return error_answer(429, "rate_limit_exceeded")
        if number % 10 == 1:
            return error_answer(503, "queue_full")
        if number == 2:
            return web.Response(status=500, text="oops")
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, mix="paid=1")

    assert result["errors"] == [
        {"status": 503, "code": "queue_full", "count": 10},
        {"status": 429, "code": "rate_limit_exceeded", "count": 10},
        {"status": 500, "code": "", "count": 1},
    ] or result["errors"] == [
        {"status": 429, "code": "rate_limit_exceeded", "count": 10},
        {"status": 503, "code": "queue_full", "count": 10},
        {"status": 500, "code": "", "count": 1},
    ]
    assert (result["completed"], result["failed"], result["answered"]) == (79, 21, 100)
    assert (result["passed"], result["error_rate"]) == (True, pytest.approx(0.21))


async def test_a_largest_error_rate_fails_the_run(stand_in: StandIn, stack_file: Path) -> None:
    """21 % errors pass at 21 % and fail at 5 %."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        return error_answer(429, "rate_limit_exceeded") if number % 5 == 0 else reversed_answer(text)

    stand_in.behaviour = behave

    assert (await bench(stand_in, stack_file, max_error_rate="20%"))["passed"]
    stand_in.number = 0
    failed = await bench(stand_in, stack_file, max_error_rate="5%")
    assert failed["faults"] == ["20.000% of the requests did not get a 200; at most 5% may."]


async def test_a_request_without_an_answer_is_a_timeout(stand_in: StandIn, stack_file: Path) -> None:
    """The run ends although one answer never comes, and says so."""
    release = asyncio.Event()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 7:
            await release.wait()
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, timeout="0.3")
    release.set()

    assert (result["completed"], result["unanswered"], result["passed"]) == (99, 1, False)
    assert result["unanswered_by_cause"] == {UnansweredCause.TIMEOUT: 1}
    assert result["faults"] == ["1 requests got no answer (1 timeout)."]


async def test_a_closed_connection_costs_its_request_alone(stand_in: StandIn, stack_file: Path) -> None:
    """The one that was under way counts as closed; the next ones get a new connection."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number in (3, 50) and request.transport:
            request.transport.close()
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="1")

    assert (result["completed"], result["unanswered"]) == (98, 2)
    assert result["unanswered_by_cause"] == {UnansweredCause.CLOSED: 2}
    assert len(stand_in.connections) == 3


async def test_a_polite_close_costs_nothing(stand_in: StandIn, stack_file: Path) -> None:
    """`Connection: close` after an answer means another connection for the next request, no more."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        answer = reversed_answer(text)
        if number % 10 == 0:
            answer.force_close()
        return answer

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="1")

    assert (result["completed"], result["unanswered"], result["passed"]) == (100, 0, True)
    assert len(stand_in.connections) == 10


async def test_crossed_answers_are_found(stand_in: StandIn, stack_file: Path) -> None:
    """Two requests that get each other's output are two crossed answers, and fail the run."""
    held: list[tuple[str, asyncio.Future[str]]] = []

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number in (10, 11):
            held.append((text, asyncio.get_running_loop().create_future()))
            if len(held) == 2:
                held[0][1].set_result(held[1][0])
                held[1][1].set_result(held[0][0])
            return reversed_answer(await held[number - 10][1])
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file)

    assert (result["crossed"], result["verified"], result["completed"]) == (2, 98, 100)
    assert result["faults"] == ["2 answers hold another output than that of their request."]


async def test_an_answer_given_twice_is_found(stand_in: StandIn, stack_file: Path) -> None:
    """An id that comes twice, and bytes that nobody asked for."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        body = msgspec.json.encode({"request_id": "req_" + "0" * 32, "output": text[::-1]})
        if number == 100 and request.transport:
            request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await asyncio.sleep(0.05)  # The second one must come as a read of its own.
        return web.Response(body=body)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, mix="paid=1", duration="0.6")

    assert result["repeated_ids"] == 119
    assert result["stray_answers"] == 1
    assert not result["passed"]


async def test_a_chunked_answer_is_told(stand_in: StandIn, stack_file: Path) -> None:
    """What the generator cannot read counts as no answer, with the reason."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        answer = reversed_answer(text)
        if number == 5:
            answer.enable_chunked_encoding()
        return answer

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file)

    assert result["unanswered_by_cause"] == {UnansweredCause.MALFORMED: 1}
    assert any("chunked" in fault for fault in result["faults"])


async def test_latency_counts_from_the_due_time(stand_in: StandIn, stack_file: Path) -> None:
    """With one connection and a server that stalls once, every request behind it was late, and the figures say so."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 1:
            await asyncio.sleep(0.3)  # The stall is the behaviour under test.
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="1")

    # 60 of 100 requests fall due during the stall, 5 ms apart; only the first was slow for the server.
    assert result["max_e2el_ms"] > 290
    assert result["median_e2el_ms"] > 30
    assert result["waited_for_connection"] >= 50


async def test_no_more_connections_than_allowed(stand_in: StandIn, stack_file: Path) -> None:
    """The cap holds however slow the server is; requests wait for their turn, and the wait is latency."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.sleep(0.02)  # Four connections carry 200 a second, half of what falls due.
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="4", rate="400", duration="0.25")

    assert len(stand_in.connections) == 4
    assert (result["completed"], result["passed"]) == (100, True)
    assert result["max_e2el_ms"] > 200


async def test_what_never_finds_a_connection_was_not_sent(stand_in: StandIn, stack_file: Path) -> None:
    """With all connections stuck, requests end unsent at their timeout, and each one has exactly one end."""
    release = asyncio.Event()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        await release.wait()
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, connections="4", timeout="0.3")
    release.set()
    causes = result["unanswered_by_cause"]

    assert set(causes) == {UnansweredCause.NOT_SENT, UnansweredCause.TIMEOUT}
    assert (
        causes[UnansweredCause.NOT_SENT] + causes[UnansweredCause.TIMEOUT]
        == result["scheduled"]
        == result["unanswered"]
        == 100
    )
    assert causes[UnansweredCause.TIMEOUT] == result["sent"] >= 4


async def test_nobody_listens(stand_in: StandIn, stack_file: Path) -> None:
    """A refused connection costs the requests, not the run."""
    stand_in.url = "http://127.0.0.1:1"
    result = await bench(stand_in, stack_file)

    assert (result["scheduled"], result["sent"], result["completed"], result["unanswered"]) == (100, 0, 0, 100)
    assert result["unanswered_by_cause"] == {UnansweredCause.CONNECT: 100}
    assert any("Cannot connect" in fault for fault in result["faults"])


async def test_objectives_decide(stand_in: StandIn, stack_file: Path) -> None:
    """A missed objective fails the run and names what was measured; goodput counts only what was in time."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)  # The latency that the objectives are about.
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, slo="enterprise.p99=20ms,paid.p99=4s,all.success=100%")

    assert [objective["met"] for objective in result["slo"]] == [False, True, True]
    assert result["faults"][0].startswith("Objective missed: enterprise.p99=20ms, measured ")
    assert result["tiers"]["enterprise"]["good"] == 0
    assert result["good"] == result["tiers"]["paid"]["good"] + result["tiers"]["free"]["good"] > 0


async def command(stand_in: StandIn, stack_file: Path, *argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tierlane", "bench", "--stack", str(stack_file), "--url", stand_in.url),
        *("--duration", "0.5", "--warmup", "0.1", "--rate", "100", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_the_command_reports_and_writes(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """Exit code 0, a table without a progress bar, CPU by role, and the document with its stable names."""
    write_stack(stack_file, processes=[{"role": "gateway", "name": "gateway-1", "pid": os.getpid()}])
    out = tmp_path / "out.json"

    code, output = await command(stand_in, stack_file, "--json", str(out))
    written = read_document(out)

    assert code == 0, output
    assert "passed" in output
    assert "enterprise" in output
    assert written["cpu_seconds"]["gateway"] > 0
    assert written["cpu_seconds"]["generator"] > 0
    assert written["settings"]["rate"] == 100
    assert not any(key in output + str(written) for key in KEYS.values())
    for name in ("request_throughput", "request_goodput", "mean_e2el_ms", "median_e2el_ms", "p99.9_e2el_ms"):
        assert written[name] > 0
        assert name in written["tiers"]["paid"]


async def test_the_command_fails_with_a_missed_objective(stand_in: StandIn, stack_file: Path) -> None:
    """Exit code 1, and the reason."""
    code, output = await command(stand_in, stack_file, "--slo", "all.max=1us")

    assert code == 1
    assert "Objective missed: all.max=1us" in output


async def test_an_interrupt_still_reports(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """Ctrl-C ends a long run at once with a report of what there is, and exit code 1."""
    arrived = asyncio.Event()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 20:
            arrived.set()
        return reversed_answer(text)

    stand_in.behaviour = behave
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tierlane", "bench", "--stack", str(stack_file), "--url", stand_in.url, "--warmup", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(20):
            await arrived.wait()
            process.send_signal(2)
            output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    assert process.returncode == 1
    assert "The run was interrupted." in output.decode()
