"""A cell that is opened, drained, killed or suspended again and again under load: no limit is exceeded, and no request lost."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from admin import NO_LIMITS, sql
from cell_load import TIERS, Overshoot, Sender, add_sender, audited, left_in_cells, lost, overshoot, send
from e2e.test_cells import admin, client_of, create_batch
from eventually import eventually
from stack import Stack, start_stack

SECONDS, CHANGE_S = 300.0, 10.0
BATCH_LINES_PER_S = 4.0
FAULTS, STOPPED_S, LATE_S = 6, 5.0, 1.0
OPTIONS = ("--cells", "3", "--gateways", "2", "--schedulers", "2", "--workers", "4")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 240)]


@pytest.fixture
def slow_stack(tmp_path: Path) -> Iterator[Stack]:
    """Three cells, two gateways, two schedulers, and four workers that move. Few requests/s are above a limit of concurrency."""
    with start_stack(tmp_path / "stack", *OPTIONS, "--backend", "simulated:250") as running:
        yield running


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """The same, with batches of 50 ms."""
    with start_stack(tmp_path / "stack", *OPTIONS, "--backend", "simulated:50") as running:
        yield running


async def senders_of(stack: Stack) -> list[Sender]:
    """Customers whose home is the cell that changes, some above their limits; those of spread have a part of them there."""
    at, slow = {"cell": "c2"}, "rate_limit_exceeded"
    large = {"requests_per_second": 1e6, "burst": 1e6}
    moving = [
        await add_sender(stack, f"moves-{tier}", tier, 2.0, **NO_LIMITS, **at)
        for tier in ("enterprise", "paid", "free")
    ]
    return [
        *moving,
        await add_sender(stack, "stays", "free", 3.0, **NO_LIMITS, cell="c3"),
        await add_sender(stack, "keyed", "paid", 2.0, keyed=True, **NO_LIMITS, **at),
        await add_sender(stack, "rate", "paid", 12.0, slow, requests_per_second=6.0, burst=8.0, **at),
        await add_sender(stack, "open", "enterprise", 12.0, slow, max_concurrency=2, **large, **at),
        await add_sender(stack, "quota", "free", 4.0, "quota_exceeded", per_10_s=20, **NO_LIMITS, **at),
        await add_sender(stack, "spread", "paid", 14.0, slow, requests_per_second=8.0, burst=12.0, spread=2, **at),
        await add_sender(stack, "spread-open", "enterprise", 30.0, slow, max_concurrency=6, spread=2, **large, **at),
        await add_sender(
            stack, "spread-quota", "free", 5.0, "quota_exceeded", per_10_s=20, spread=3, **NO_LIMITS, **at
        ),
    ]


async def change(stack: Stack) -> int:
    """Drain and open the second cell in turn; returns how often."""
    verbs, changes, began = admin(stack), int(SECONDS / CHANGE_S), time.monotonic()
    for number in range(changes):
        await asyncio.sleep(max(0.0, began + (number + 1) * CHANGE_S - time.monotonic()))
        await verbs.done("cell", "open" if number % 2 else "drain", "c2")
    return changes


async def outputs(client: openai.AsyncOpenAI, batch_id: str) -> list[tuple[str, int]]:
    """The `custom_id` and the status of each line, once the batch has ended."""

    async def ended() -> Any:
        await asyncio.sleep(0.5)
        found = await client.batches.retrieve(batch_id)
        return found if found.status == "completed" else None

    batch = await eventually(ended, "the batch has ended", 120.0)
    assert batch.error_file_id is None, (await client.files.content(batch.error_file_id)).text[:2000]
    lines = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert {(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines} == {
        (line["custom_id"], f"p{line['custom_id']}"[::-1]) for line in lines
    }
    return [(line["custom_id"], line["response"]["status_code"]) for line in lines]


async def test_a_cell_is_opened_and_drained_every_ten_seconds(slow_stack: Stack) -> None:
    """Its customers, those of several cells, and a batch are never above a limit, and each request has one right response and row."""
    stack = slow_stack
    await stack.healthy(4)
    senders = await senders_of(stack)
    lines = await add_sender(stack, "batch", "paid", 0.0, requests_per_second=6.0, burst=6.0, cell="c2")
    changed = asyncio.create_task(change(stack))
    async with client_of(stack, lines.customer) as client:
        batch = await create_batch(client, int(SECONDS * BATCH_LINES_PER_S))
        await send(stack, senders, changed.done)
        results = await outputs(client, batch)
    answers = [answer for each in senders for answer in each.answers]
    refused = sum(answer.status == 429 for answer in answers)
    print(f"{await changed} changes, {len(answers)} requests, {refused} refused, {len(results)} lines of a batch")
    for each in senders:
        print(f"{each.customer.name}: {dict(each.statuses)}, longest {each.longest_s:.3f} s")
    assert [each.customer.name for each in senders if not each.statuses.keys() <= each.expected] == []
    assert lost(answers) == {}
    assert sorted(results) == sorted((str(n), 200) for n in range(int(SECONDS * BATCH_LINES_PER_S)))

    rows = await audited(stack, [*senders, lines], len(results))
    found: dict[str, Overshoot] = {}
    for each in (*senders, lines):
        own = [row for row in rows.values() if row.customer_id == each.customer.id]
        found[each.customer.name] = overshoot(each, own)
        print(f"{each.customer.name}: {found[each.customer.name]}")
    assert {row.status for row in rows.values()} == {"completed"}
    assert [name for name, each in found.items() if not each.none] == []
    await eventually(lambda: is_empty(stack), "nothing is left in any cell", 90.0)
    await stack.healthy(4)


async def is_empty(stack: Stack) -> bool:
    """Whether nothing is left in any cell."""
    return not await left_in_cells(stack)


async def kill(stack: Stack) -> None:
    """The server of the second cell is killed every ten seconds; a new, empty one is started."""
    for _ in range(FAULTS):
        await asyncio.sleep(CHANGE_S)
        os.kill(stack.pids("redis")["redis-c2"], signal.SIGKILL)
    await asyncio.sleep(CHANGE_S)


async def suspend(stack: Stack) -> None:
    """The server of the second cell does not respond for five seconds, again and again."""
    pid = stack.pids("redis")["redis-c2"]
    for _ in range(FAULTS):
        await asyncio.sleep(CHANGE_S - STOPPED_S)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(CHANGE_S)


@pytest.mark.parametrize("fault", [kill, suspend])
async def test_a_cell_is_lost_again_and_again(stack: Stack, fault: Callable[[Stack], Awaitable[None]]) -> None:
    """Customers of other cells do not notice; its own have one right response and one row each, in direct mode or through Redis."""
    await stack.healthy(4)
    await sql(stack, "INSERT INTO cells (name) VALUES ('default') ON CONFLICT DO NOTHING")
    own = [await add_sender(stack, f"own-{tier}", tier, 8.0, **NO_LIMITS, cell="c2") for tier in TIERS]
    others = [
        await add_sender(stack, f"other-{tier}-{cell}", tier, 5.0, **NO_LIMITS, cell=cell)
        for tier in TIERS
        for cell in ("default", "c3")
    ]
    faults = asyncio.create_task(fault(stack))  # type: ignore[arg-type]
    await send(stack, [*others, *own], faults.done)
    await faults
    everyone = [*own, *others]
    for each in everyone:
        print(f"{fault.__name__} {each.customer.name}: {dict(each.statuses)}, longest {each.longest_s:.3f} s")
    assert {each.customer.name: (lost(each.answers), set(each.statuses)) for each in everyone} == {
        each.customer.name: ({}, {(200, None)}) for each in everyone
    }
    await eventually(lambda: not list(stack.data_dir.glob("gateway-*/**/spool/*.log*")), "the spools are merged", 20.0)
    rows = await audited(stack, everyone)
    modes = {True: Counter[str](), False: Counter[str]()}  # By whether it is a customer of the lost cell.
    for each in everyone:
        modes[each in own].update(rows[answer.request_id or ""].mode for answer in each.answers)
    print(modes)

    assert {row.status for row in rows.values()} == {"completed"}
    assert (set(modes[True]) <= {"queue", "direct"}, set(modes[False])) == (True, {"queue"})
    assert fault is kill or "direct" in modes[True]  # A killed server may be back before the breaker opens.
    assert [each.longest_s for each in others if each.longest_s > LATE_S] == []
    await eventually(lambda: is_empty(stack), "nothing is left in any cell", 90.0)
    await stack.healthy(4)
