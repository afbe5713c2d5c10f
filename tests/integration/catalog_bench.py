"""A very large catalog, measured: `PYTHONPATH=tests python tests/integration/catalog_bench.py [customers]`.

Prints how long loading takes, what it holds in memory, how long it holds up the loop, and how fast changes arrive.
"""

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import uvloop

from eventually import eventually
from integration.ledger_fixtures import fill_catalog
from ledger.catalog.follower import Catalog
from ledger.catalog.loader import load_whole
from ledger.migration import upgrade_to_head
from scheduler.errors import RequestError
from tierlane.embedded.postgres import EmbeddedPostgres


def rss_mib() -> float:
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


class Stalls:
    """How much CPU time one turn of the loop took; the time of other processes is not in it."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.over_5_ms = 0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            took_ms = (now - before) * 1000
            self.longest_ms = max(self.longest_ms, took_ms)
            self.over_5_ms += took_ms > 5
            before = now


@contextmanager
def told(what: str) -> Iterator[None]:
    stalls = Stalls()
    watcher = asyncio.create_task(stalls.watch())
    began, cpu, memory = time.perf_counter(), time.process_time(), rss_mib()
    yield
    watcher.cancel()
    print(
        f"{what}: {time.perf_counter() - began:.3f} s, CPU {time.process_time() - cpu:.3f} s, longest stall "
        f"{stalls.longest_ms:.1f} ms ({stalls.over_5_ms} over 5 ms), memory {rss_mib() - memory:+.1f} MiB"
    )


async def arrives(what: str, db: Any, sql: str, condition: Callable[[], bool]) -> None:
    """Time from the commit until the condition holds."""
    stalls = Stalls()
    watcher = asyncio.create_task(stalls.watch())
    await db.execute(sql)
    began = time.perf_counter()
    while not condition():
        await asyncio.sleep(0.001)
        if time.perf_counter() - began > 20:
            raise TimeoutError(what)
    watcher.cancel()
    print(f"{what}: {1000 * (time.perf_counter() - began):.1f} ms, longest stall {stalls.longest_ms:.1f} ms")


def refused(catalog: Catalog, key: str) -> bool:
    try:
        catalog.identify(key, time.time())
    except RequestError:
        return True
    return False


async def work() -> None:
    """As a gateway's loop under full load."""
    while True:
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


async def measure(server: EmbeddedPostgres, count: int) -> None:
    db = await asyncpg.connect(server.dsn)
    began = time.perf_counter()
    keys = await fill_catalog(db, count, known=5)
    print(f"filled with {count} customers and keys in {time.perf_counter() - began:.1f} s")
    catalog = Catalog(server.url)
    gc.collect()
    with told("first load"):
        await catalog.start()
    with told("everything again, nothing different"):
        await load_whole(db, catalog.snapshot)
    for n, key in enumerate(keys[:4]):
        sql = f"UPDATE api_keys SET revoked_at = now() WHERE id = '{key[3:15]}'"
        await arrives(f"revocation {n}", db, sql, lambda key=key: refused(catalog, key))
    for value in (7, 8):
        sql = f"UPDATE tiers SET burst = {value} WHERE name = 'paid'"
        await arrives("a tier", db, sql, lambda value=value: catalog.snapshot.tier("paid").burst == value)
    await eventually(lambda: not catalog._garbage, "the old picture is gone", 30)
    print(f"memory of the process: {rss_mib():.1f} MiB")
    print("the same beside other work of the process, which takes 2 ms of each turn:")
    working = asyncio.create_task(work())
    key = keys[4]
    sql = f"UPDATE api_keys SET revoked_at = now() WHERE id = '{key[3:15]}'"
    await arrives("revocation", db, sql, lambda: refused(catalog, key))
    sql = "UPDATE tiers SET burst = 9 WHERE name = 'paid'"
    await arrives("a tier", db, sql, lambda: catalog.snapshot.tier("paid").burst == 9)
    await eventually(lambda: not catalog._garbage, "the old picture is gone", 30)
    print(f"memory of the process: {rss_mib():.1f} MiB")
    working.cancel()
    await catalog.stop()
    await db.close()


async def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        server = EmbeddedPostgres(Path(home), Path(home) / "socket", ephemeral=True)
        await server.start()
        try:
            await upgrade_to_head(server.url)
            await measure(server, count)
        finally:
            await server.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
