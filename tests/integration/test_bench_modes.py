"""The closed loop, several customers a tier, the bare echo beside the run, and the report that is written of it."""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from bench_stand_in import (
    KEYS,
    StandIn,
    bench,
    read_document,
    reversed_answer,
    stack_file,
    stand_in,
    write_stack,
)
from tierlane.bench.plan import BenchUsageError
from tierlane.bench.plots import write_report
from tierlane.bench.report import Document
from tierlane.bench.statistics import UnansweredCause

__all__ = ["stack_file", "stand_in"]


async def test_a_closed_loop_has_one_request_a_connection_under_way(stand_in: StandIn, stack_file: Path) -> None:
    """Never more than there are connections, and the next one as soon as the last one is answered."""
    under_way = most = 0

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)  # So that there is something under way.
        under_way -= 1
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, mode="closed", connections="5")

    assert (most, len(stand_in.connections)) == (5, 5)
    assert (result["passed"], result["faults"]) == (True, [])
    assert result["completed"] == result["scheduled"] == result["verified"] == stand_in.number
    assert stand_in.number > 5 * 5
    assert {tier: result["tiers"][tier]["completed"] for tier in KEYS} == {
        tier: stand_in.keys.count(key) for tier, key in KEYS.items()
    }


async def test_a_closed_loop_goes_on_after_a_closed_connection(stand_in: StandIn, stack_file: Path) -> None:
    """The user whose request was lost comes back, after a moment, with another one."""

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        if number == 3 and request.transport:
            request.transport.close()
        await asyncio.sleep(0.005)
        return reversed_answer(text)

    stand_in.behaviour = behave
    result = await bench(stand_in, stack_file, mode="closed", connections="1")

    assert result["unanswered_by_cause"] == {UnansweredCause.CLOSED: 1}
    assert len(stand_in.connections) == 2
    assert stand_in.number > 10


async def test_a_closed_loop_on_nobody_does_not_spin(stand_in: StandIn, stack_file: Path) -> None:
    """A refused connection costs its user a moment."""
    stand_in.url = "http://127.0.0.1:1"
    result = await bench(stand_in, stack_file, mode="closed", connections="4")

    # Half a second, and a tenth of one after each refusal.
    assert 4 <= result["unanswered"] <= 4 * 6
    assert result["unanswered_by_cause"] == {UnansweredCause.CONNECT: result["unanswered"]}


async def test_a_closed_loop_ends_at_its_time_though_an_answer_is_late(stand_in: StandIn, stack_file: Path) -> None:
    """What is under way at the end is waited for, and nothing follows it."""
    release = asyncio.Event()
    arrived = asyncio.Event()

    async def behave(number: int, text: str, request: web.Request) -> web.Response:
        arrived.set()
        await release.wait()
        return reversed_answer(text)

    stand_in.behaviour = behave
    running = asyncio.create_task(bench(stand_in, stack_file, mode="closed", connections="2", duration="0.2"))
    await arrived.wait()
    asyncio.get_running_loop().call_later(0.5, release.set)
    result = await running

    assert (stand_in.number, result["completed"], result["unanswered"]) == (2, 2, 0)
    assert result["max_e2el_ms"] > 300


async def test_customers_of_a_tier_take_turns(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """Keys of a file: each of a tier is used as often as the others."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"paid,k{number}\n" for number in range(4)) + "free,f\n")

    result = await bench(stand_in, stack_file, mix="paid=1", keys=str(keys))

    assert Counter(stand_in.keys) == {f"k{number}": 25 for number in range(4)}
    assert result["completed"] == 100


async def test_a_key_that_cannot_be_sent_is_told(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """Before anything is sent, and without the key."""
    keys = tmp_path / "keys"
    keys.write_text("paid,with spaces in it\n")

    with pytest.raises(BenchUsageError, match="A key cannot be used: An API key may"):
        await bench(stand_in, stack_file, mix="paid=1", keys=str(keys))
    assert stand_in.number == 0


@pytest.mark.parametrize("mode", ["open", "closed"])
async def test_an_echo_is_measured_beside_the_run(mode: str, stand_in: StandIn, stack_file: Path) -> None:
    """As many processes as there are gateways, loaded in the same way, and the cost of the stack told beside theirs."""
    names = ("gateway-1", "gateway-2")
    write_stack(stack_file, processes=[{"role": "gateway", "name": name, "pid": os.getpid()} for name in names])
    result = await bench(stand_in, stack_file, mode=mode, connections="4", duration="1")
    echo = result["echo"]

    assert (echo["processes"], echo["failed"]) == (2, 0)
    assert echo["cpu_us"] > 0
    assert echo["rate"] > 100
    assert echo["median_ms"] > 0
    assert result["cpu_over_echo"] == pytest.approx(
        result["server_cpu_seconds_per_1000"] * 1000 / echo["cpu_us"], abs=0.001
    )
    assert result["rss_mb"]["gateway"]["begin"] > 0


async def test_no_echo_where_nobody_knows_the_gateways(stand_in: StandIn, stack_file: Path) -> None:
    """With a stack file of keys alone there is nothing to compare it with."""
    result = await bench(stand_in, stack_file)

    assert (result["echo"], result["cpu_over_echo"]) == (None, None)


async def test_a_report_shows_every_picture_that_it_writes(stand_in: StandIn, stack_file: Path, tmp_path: Path) -> None:
    """A page, its pictures beside it, nothing from elsewhere, and no key in any of it."""
    write_stack(stack_file, processes=[{"role": "gateway", "name": "gateway-1", "pid": os.getpid()}])
    result = await bench(stand_in, stack_file, duration="1.5", echo="off")
    page, pictures = await asyncio.to_thread(written_report, tmp_path, result)

    assert pictures == {"percentiles.png", "histogram.png", "timeline.png", "timeline-p99.png", "cpu.png"}
    assert {name for name in pictures if f'src="{name}"' in page} == pictures
    assert read_document(tmp_path / "result.json")["completed"] == result["completed"]
    assert "://" not in page
    assert not any(key in page for key in KEYS.values())


def written_report(directory: Path, result: Document) -> tuple[str, set[str]]:
    """The page, and the pictures that are pictures."""
    write_report(directory, result)
    pictures = {path.name for path in directory.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    return (directory / "index.html").read_text(), pictures
