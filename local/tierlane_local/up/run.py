"""`tierlane up`: lock, port, signals, exit code.

The first Ctrl-C, SIGTERM or SIGHUP stops everything after the open requests, the second kills everything at once.
"""

import asyncio
import contextlib
import os
import secrets
import signal

from pydantic import SecretStr

from tierlane.settings.model import Settings
from tierlane_local.embedded import EmbeddedServerError
from tierlane_local.up.data_dir import DataDir, LogLines, StackError, held_port, standard_output
from tierlane_local.up.leftovers import end_leftovers
from tierlane_local.up.members import Command, role_command
from tierlane_local.up.orphan_guard import MARK_VARIABLE, OrphanGuard
from tierlane_local.up.stack import Stack

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILED = 1


def run(settings: Settings, command: Command = role_command) -> int:
    """Run the local stack until it is stopped; return the exit code. `command` returns the argv of a role."""
    lines = standard_output()
    try:
        return _run_locked(settings, lines, command)
    except (StackError, EmbeddedServerError) as error:
        lines.say(f"cannot start: {error}")
        return FAILED


def _run_locked(settings: Settings, lines: LogLines, command: Command) -> int:
    data_dir = DataDir(settings.data_dir)
    try:
        end_leftovers(data_dir, lines, replace=settings.replace)
        with contextlib.ExitStack() as held:
            port = held.enter_context(held_port(settings.host, settings.port))
            if settings.grpc_port:
                held.enter_context(held_port(settings.host, settings.grpc_port, "--grpc-port"))
            updates: dict[str, object] = {"data_dir": data_dir.path, "port": port}
            if not settings.service_token.get_secret_value():
                updates["service_token"] = SecretStr(data_dir.service_token())
            settings = settings.model_copy(update=updates)
            # All processes of the stack inherit it.
            os.environ[MARK_VARIABLE] = secrets.token_hex(16)
            guard = OrphanGuard(data_dir)
            try:
                asyncio.run(_serve(Stack(settings, data_dir, guard, lines, command), lines))
            finally:
                guard.release()
    finally:
        data_dir.release()
    return 0


async def _serve(stack: Stack, lines: LogLines) -> None:
    """Run the stack until a signal arrives or it fails, then stop it. Raises the error of the stack."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            stack.kill()
        else:
            lines.say("waiting for open requests, then stopping; press Ctrl-C again to kill everything now")
            stopping.set()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(stack.run(), name="stack")
    waiting = asyncio.create_task(stopping.wait(), name="signals")
    try:
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed = running.done()
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await stack.stop()
        lines.say("stopped")
    if failed:
        running.result()
