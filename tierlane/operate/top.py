"""`tierlane top`: asks a gateway once a second and redraws; `q` or Ctrl-C ends it. What is drawn is in `top_frame`."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console
from rich.live import Live

from tierlane.connect import VerbError, run
from tierlane.operate.gateway_client import Gateway, gateway_of, read_health
from tierlane.operate.top_frame import Seen, frame
from tierlane.output import WIDE
from tierlane.setting_errors import SettingsError

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

EVERY_S = 1.0


def watch(settings: "Settings", url: str | None, *, once: bool) -> int:
    """Show frames until it is ended, or a single one; the exit code. Raises SettingsError without a gateway."""
    gateway = gateway_of(settings, url)
    if gateway is None:
        raise SettingsError(
            f"--url: is not given, and no local stack runs in {settings.data_dir}; "
            "give it, start `tierlane up`, or name the stack's --data-dir"
        )
    console = Console(highlight=False)
    single = once or not console.is_terminal
    return run(lambda: _single(gateway, console) if single else _live(gateway, console))


async def _single(gateway: Gateway, console: Console) -> int:
    if not console.is_terminal:
        console.width = min(WIDE, 120)
    async with aiohttp.ClientSession() as session:
        seen = await _look(session, gateway, Seen(gateway.url))
    console.print(frame(seen, time.monotonic()))
    return 0 if seen.problem is None else 1


async def _live(gateway: Gateway, console: Console) -> int:
    stop, seen = asyncio.Event(), Seen(gateway.url)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with _keys(stop), Live(console=console, screen=True, auto_refresh=False) as live:
        async with aiohttp.ClientSession() as session:
            while not stop.is_set():
                seen = await _look(session, gateway, seen)
                live.update(frame(seen, time.monotonic()), refresh=True)
                await _stopped(stop, EVERY_S)
    return 0


async def _look(session: aiohttp.ClientSession, gateway: Gateway, before: Seen) -> Seen:
    """The newest picture; the one before with what is wrong where there is none."""
    try:
        return Seen(gateway.url, await read_health(session, gateway), time.monotonic())
    except VerbError as error:
        return before._replace(problem=str(error))


async def _stopped(stop: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await stop.wait()
    except TimeoutError:
        return


@contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """`q` sets `stop`, without Enter; the terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - not where there is no terminal
    import tty  # noqa: PLC0415

    inside, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(inside)
    tty.setcbreak(inside)

    def pressed() -> None:
        if b"q" in os.read(inside, 64).lower():
            stop.set()

    loop.add_reader(inside, pressed)
    try:
        yield
    finally:
        loop.remove_reader(inside)
        termios.tcsetattr(inside, termios.TCSADRAIN, before)
