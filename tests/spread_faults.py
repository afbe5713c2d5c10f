"""Faults of allotters, of the network between them and the cells, and of a cell, for customers of four cells."""

import asyncio
import os
import signal

from spread_load import CELLS, World
from tierlane_tools.chaos.faults.proxy import NetworkFault


async def killed(world: World) -> None:
    """The active allotter is killed; the other one takes over."""
    active = await world.active()
    active.kill()
    await asyncio.sleep(6.0)
    active.start()


async def all_killed(world: World) -> None:
    """There is no allotter for longer than a lease."""
    for allotter in world.allotters:
        allotter.kill()
    await asyncio.sleep(7.0)
    for allotter in world.allotters:
        allotter.start()


async def suspended(world: World) -> None:
    """The active allotter is suspended, until another one is active."""
    active = await world.active()
    active.signal(signal.SIGSTOP)
    await asyncio.sleep(6.0)
    active.signal(signal.SIGCONT)


async def suspended_often(world: World) -> None:
    """The active allotter is suspended for less than its lease, again and again."""
    for _ in range(3):
        active = await world.active()
        active.signal(signal.SIGSTOP)
        await asyncio.sleep(1.7)
        active.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)


async def partitioned(world: World) -> None:
    """The active allotter cannot reach one cell, and the other one can."""
    with world.cut([await world.active()], ["west"]):
        await asyncio.sleep(6.0)


async def all_partitioned(world: World) -> None:
    """No allotter can reach the busiest cell, which serves on."""
    with world.cut(world.allotters, ["default"]):
        await asyncio.sleep(7.0)


async def partitioned_by_halves(world: World) -> None:
    """Each allotter can reach two cells only."""
    one, two = world.allotters
    with world.cut([one], ["default", "east"]), world.cut([two], ["north", "west"]):
        await asyncio.sleep(6.0)


async def replies_lost(world: World) -> None:
    """Calls of all allotters to two cells are executed, but their replies are lost."""
    with world.cut(world.allotters, ["north", "west"], NetworkFault(drop_replies=True)):
        await asyncio.sleep(5.0)


async def slow(world: World) -> None:
    """Calls take longer than their timeout in one cell, and nearly as long in all others."""
    with (
        world.cut(world.allotters, ["east"], NetworkFault(delay_s=0.4)),
        world.cut(world.allotters, ["default", "north", "west"], NetworkFault(delay_s=0.08)),
    ):
        await asyncio.sleep(6.0)


async def server_suspended(world: World) -> None:
    """The server of one cell stops for longer than a lease. What it has received is executed afterwards."""
    pid = world.servers["west"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(4.5)
    finally:
        os.kill(pid, signal.SIGCONT)


async def fewer_cells(world: World) -> None:
    """The customers leave one cell, and come back. Gateways go on to send requests to all four."""
    rows = list(world.rows.values())
    world.catalog(*[row | {"cells": list(CELLS[:3])} for row in rows])
    await asyncio.sleep(3.0)
    world.catalog(*rows)
    await asyncio.sleep(3.0)


async def one_cell(world: World) -> None:
    """The customers use one cell only, and again four; for gateways they are customers of several cells all the time."""
    rows = list(world.rows.values())
    world.catalog(*[row | {"cells": ["default"], "shared": False} for row in rows])
    await asyncio.sleep(4.0)
    world.catalog(*rows)
    await asyncio.sleep(3.0)


FAULTS = (
    killed,
    all_killed,
    suspended,
    suspended_often,
    partitioned,
    all_partitioned,
    partitioned_by_halves,
    replies_lost,
    slow,
    server_suspended,
    fewer_cells,
    one_cell,
)
