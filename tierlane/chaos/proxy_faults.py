"""Faults of the network between one client process and one server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierlane.chaos.faults.proxy import Weather
from tierlane.chaos.faults.target import Doing
from tierlane.chaos.ground import Ground
from tierlane.chaos.schedule import Planned


def weather(**what: bool) -> Doing:
    """A spell of this weather; its delay is drawn with the fault."""

    @asynccontextmanager
    async def held(ground: Ground, fault: Planned) -> AsyncIterator[str]:
        proxy = ground.proxy(fault.place, fault.index)
        delay_s = fault.parameters.get("delay_ms", 0.0) / 1000
        try:
            with proxy.held(Weather(delay_s=delay_s, **what)):
                yield f"{delay_s * 1000:.0f} ms" if delay_s else ""
        finally:
            await proxy.settle()

    return held


@asynccontextmanager
async def cut(ground: Ground, fault: Planned) -> AsyncIterator[str]:
    """Every connection is reset on both sides."""
    yield f"{ground.proxy(fault.place, fault.index).cut()} connections"
