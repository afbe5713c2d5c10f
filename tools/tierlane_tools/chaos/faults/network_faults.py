"""Faults of the network, injected by proxies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierlane_tools.chaos.faults.proxy import NetworkFault
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.target import FaultAction, StackTargets


def network(**effects: bool) -> FaultAction:
    """A network fault; its delay is a parameter of the planned fault."""

    @asynccontextmanager
    async def injected(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
        proxy = targets.proxy(fault.place, fault.index)
        delay_s = fault.parameters.get("delay_ms", 0.0) / 1000
        try:
            with proxy.inject(NetworkFault(delay_s=delay_s, **effects)):
                yield f"{delay_s * 1000:.0f} ms" if delay_s else ""
        finally:
            await proxy.reopen()

    return injected


@asynccontextmanager
async def cut(targets: StackTargets, fault: Planned) -> AsyncIterator[str]:
    """Reset every connection on both sides."""
    yield f"{targets.proxy(fault.place, fault.index).cut()} connections"
