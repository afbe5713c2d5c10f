"""One customer attacks with a free key; steady traffic of enterprise is not affected.

The attack sends new `Idempotency-Key`s, bodies near the limit, abandoned streams, jobs with hostile callbacks, and
incomplete bodies. `WORST_SECONDS` and `WORST_RATE` (requests/s) in the environment reduce it; from 300 s on the attack
lasts several times as long as an admitted request is kept, so that data that is kept too long shows.
"""

import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from redis.asyncio import Redis

import worst_customer
from admin import NewCustomer, add_customer, sql
from eventually import eventually
from hostile_connections import LARGEST
from measured_load import MeasuredLoad, Stream, figures, p99_ms
from stack import Stack, start_stack
from worst_customer import AcceptedRequest, Orders

SECONDS = float(os.environ.get("WORST_SECONDS", "600"))
RATE = float(os.environ.get("WORST_RATE", "100"))
GPUS = 8
SIMULATED = ("--backend", "simulated:50", "--workers", str(GPUS), "--max-batch-size", "8")
TWO_GATEWAYS = ("--gateways", "2")  # The default of `tierlane up`.
GOOD_RATE = 40.0  # Requests/s of enterprise: even in batches of one they need two of the GPUs.
WARM_S, SETTLE_S = 10.0, 20.0
ALONE_S = max(20.0, SECONDS / 10)
ATTACK_WARM_S = max(20.0, SECONDS / 10)  # Until requests of every kind have reached all of their deadlines.
ATTACK_S = max(20.0, SECONDS - WARM_S - SETTLE_S - 2 * ALONE_S - ATTACK_WARM_S)
INTERVALS = {
    "warm": WARM_S,
    "alone before": ALONE_S,
    "attack begins": ATTACK_WARM_S,
    "under attack": ATTACK_S,
    "attack ends": SETTLE_S,
    "alone after": ALONE_S,
}
ENDED_S = 15.0  # The longest deadline of a connection is that of bodies, 10 s.
SLOWER, MAY_GROW = 1.2, 1.10

# See docs/limits.md, "What one customer takes of Redis".
KEPT_S, ROW_BYTES, PER_BYTE = 34.0, 1200, 1.25
REPLAYS_BYTES = 16 << 20
BODIES_BYTES = 100 * LARGEST  # The concurrency of tier free.
BUFFERS_BYTES = 16 << 20  # Commands and replies in transit.

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 300)]


class MemorySamples:
    """The memory of all gateways and of Redis, with the time (monotonic seconds) of each sample."""

    def __init__(self, gateways: list[psutil.Process], redis: "Redis") -> None:
        self._gateways, self._redis = gateways, redis
        self.resident: list[tuple[float, int]] = []
        self.used: list[tuple[float, int]] = []

    async def watch(self) -> None:
        """Sample once a second until cancelled."""
        while True:
            now = time.monotonic()
            self.resident.append((now, sum(gateway.memory_info().rss for gateway in self._gateways)))
            self.used.append((now, int((await self._redis.info("memory"))["used_memory"])))
            await asyncio.sleep(1.0)

    @staticmethod
    def between(samples: list[tuple[float, int]], begin: float, end: float) -> float:
        """The median of the samples in between."""
        return statistics.median(value for at, value in samples if begin <= at <= end)


def allowed(accepted: list[AcceptedRequest], at: float) -> float:
    """The bytes of Redis that these requests may take at a time: all of the last 34 s, then only results of keys."""
    recent = sum(ROW_BYTES + PER_BYTE * each.size for each in accepted if at - KEPT_S - 2.0 <= each.at_s <= at)
    return recent + REPLAYS_BYTES + BODIES_BYTES + BUFFERS_BYTES


@pytest.fixture
def open_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with more GPUs than the load needs, and callbacks to this machine allowed."""
    secret = "whsec_YSBzZWNyZXQgb2YgdGhpcnR5LXR3byBieXRlcyAxMjM="
    jobs = {"TIERLANE_CALLBACK_SECRET": secret, "TIERLANE_CALLBACK_PRIVATE_ADDRESSES": "true"}
    home = tmp_path_factory.mktemp("worst")
    with start_stack(home, *SIMULATED, *TWO_GATEWAYS, environment=jobs) as stack:
        yield stack


@asynccontextmanager
async def receivers() -> AsyncIterator[tuple[int, int]]:
    """Two ports for callbacks: one that never responds, one that refuses connections."""
    with socket.create_server(("", 0)) as hanging, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        hanging.setblocking(False)
        held: list[socket.socket] = []

        def accept() -> None:
            with suppress(BlockingIOError):
                held.append(hanging.accept()[0])
            while len(held) > 1000:
                held.pop(0).close()

        asyncio.get_running_loop().add_reader(hanging, accept)
        try:
            yield hanging.getsockname()[1], refusing.getsockname()[1]
        finally:
            asyncio.get_running_loop().remove_reader(hanging)
            for each in held:
                each.close()


async def attack(orders: Orders, begin_s: float, seconds: float) -> tuple[dict[str, Any], float]:
    """Attack after `begin_s`; returns the report, and the seconds until the last connection ended."""
    await asyncio.sleep(begin_s)
    script, pipe = Path(worst_customer.__file__), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), json.dumps(asdict(orders)), stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    try:
        await asyncio.sleep(seconds)
        process.stdin.close()
        began = time.monotonic()
        output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    return json.loads(output), time.monotonic() - began


def connections(gateways: list[psutil.Process], port: int) -> int:
    """The number of connections to the port, in any state."""
    found = [each for gateway in gateways for each in gateway.net_connections(kind="tcp")]
    return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in found)


async def test_an_attacking_customer_does_not_affect_enterprise(open_stack: Stack) -> None:
    """Its p99 stays within 1.2 x, all its requests succeed, memory is bounded, and the attack leaves nothing behind."""
    stack = open_stack
    await stack.healthy(GPUS)
    good = stack.key("enterprise")
    worst = await add_customer(stack, "worst", "free")
    address = urlsplit(stack.url)
    port = address.port or 80
    gateways = [psutil.Process(pid) for pid in stack.pids("gateway").values()]
    async with receivers() as (hanging, refusing), Redis.from_url(stack.redis_url) as redis:
        orders = Orders(address.hostname or "", port, worst.key, RATE, hanging, refusing)
        hosts = (orders.callback_hosts, worst.name)
        await sql(stack, "UPDATE customers SET callback_hosts = $1 WHERE name = $2", *hosts)
        memory = MemorySamples(gateways, redis)
        load = MeasuredLoad(stack.url, {"enterprise": Stream(good, GOOD_RATE)}, tuple(INTERVALS.values()), seed=1)
        began = time.monotonic()
        watching = asyncio.create_task(memory.watch())
        attacking = asyncio.create_task(attack(orders, WARM_S + ALONE_S, ATTACK_WARM_S + ATTACK_S))
        intervals = dict(zip(INTERVALS, await load.run(), strict=True))
        watching.cancel()
        report, ended_s = await attacking
        await eventually(lambda: connections(gateways, port) == 0, "every connection has ended", ENDED_S)
        await no_open_request(redis, worst)
    accepted = [AcceptedRequest(*each) for each in report["accepted"]]
    attacked = began + WARM_S + ALONE_S
    before = memory.between(memory.used, began + WARM_S, attacked)
    over = max((used - before) / allowed(accepted, at) for at, used in memory.used if at >= attacked)
    warm_at, last_at = attacked + ATTACK_WARM_S, attacked + ATTACK_WARM_S + ATTACK_S
    warm = memory.between(memory.resident, warm_at - 10, warm_at)
    last = memory.between(memory.resident, last_at - 10, last_at)
    p99 = {name: p99_ms(interval["enterprise"]) for name, interval in intervals.items()}
    for name, interval in intervals.items():
        print(figures(name, interval, INTERVALS[name]))
    print(
        f"good requests were sent late by {load.late_ms:.0f} ms (p99); the attack by {report['late_s']:.1f} s at most"
    )
    print(f"attack: {dict(sorted(report['answers'].items()))}; all ended {ended_s:.1f} s after its end")
    print(f"p99 under attack x {p99['under attack'] / p99['alone before']:.2f}")
    print(f"Redis: {before / 2**20:.1f} MiB before, {max(used for _, used in memory.used) / 2**20:.1f} MiB at most,")
    print(f"  {memory.used[-1][1] / 2**20:.1f} MiB at the end; at most {over:.0%} of what is allowed")
    print(f"  {len(accepted)} accepted, {sum(each.size for each in accepted) / 2**20:.0f} MiB")
    print(
        f"gateways: {warm / 2**20:.0f} MiB after {ATTACK_WARM_S:.0f} s of the attack, {last / 2**20:.0f} MiB at its end"
    )

    assert [(each["enterprise"].failures, each["enterprise"].missing) for each in intervals.values()] == [(0, 0)] * 6
    assert p99["under attack"] <= SLOWER * p99["alone before"]
    assert over <= 1.0
    assert last <= MAY_GROW * warm
    assert (report["held"], ended_s <= ENDED_S) == (0, True)
    assert len({answer.split(":")[0] for answer in report["answers"]}) == len(set(worst_customer.KINDS))


async def no_open_request(redis: "Redis", worst: NewCustomer) -> None:
    """The customer has no lease, so each of its requests has ended."""

    async def none() -> bool:
        return await redis.zcard(f"rl:leases:{worst.id}") == 0

    await eventually(none, "no request of the attack is open", 30.0)
