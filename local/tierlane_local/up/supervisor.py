"""Supervises the processes of the stack: starts them, restarts them after a backoff, stops them in order."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from tierlane_local.child_process import ChildProcess
from tierlane_local.embedded import EmbeddedServerError
from tierlane_local.embedded.process import EmbeddedServer
from tierlane_local.up.data_dir import LogLines, StackError
from tierlane_local.up.orphan_guard import OrphanGuard
from tierlane_local.up.restart_backoff import RestartBackoff

WATCH_S = 0.05
USAGE_EXIT_CODE = 2  # A role that rejects its settings would reject them again.
TRIALS = 4  # Failures of a process before the stack is ready.

# The groups are stopped in this order, each with a number of seconds before it is killed, for roles after their drain.
# Gateways are first, so that workers can still finish the accepted requests.
DRAINING = frozenset({"gateway", "worker"})
STOP_STAGES: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"gateway"}), 1.5),
    (frozenset({"worker", "scheduler", "migrate"}), 1.2),
    (frozenset({"redis", "postgres"}), 0.8),
)


class Supervisor:
    """The running processes. `changed` is called when the set of processes has changed.

    `drain_s`: how long gateways and workers may wait for their requests when they are stopped.
    """

    def __init__(self, guard: OrphanGuard, lines: LogLines, changed: Callable[[], None], drain_s: float = 0.0) -> None:
        self._drain_s = drain_s
        self._guard = guard
        self._lines = lines
        self._changed = changed
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._not_starting = asyncio.Event()
        self._start_failure = ""
        self.members: list[ChildProcess] = []

    async def add(self, member: ChildProcess) -> None:
        """Start a process and restart it when it ends. Raises the error of the first start."""
        self.members.append(member)
        await self._start(member)
        self._keepers[member.name] = asyncio.create_task(self._keep(member), name=f"keep {member.name}")

    async def add_server(self, server: EmbeddedServer) -> None:
        """As `add`; the guard also ends processes of the server that it has not seen."""
        self._guard.hold_servers_of(server.home)
        await self.add(server)

    async def remove(self, member: ChildProcess, grace_s: float) -> None:
        """Stop a process, kill it `grace_s` seconds after its drain, and do not restart it."""
        supervisor = self._keepers.pop(member.name)
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        await member.stop(self._longest_s(member, grace_s))
        self.members.remove(member)
        self._changed()

    async def run_once(self, member: ChildProcess) -> int:
        """Run a process to its end; return its exit code."""
        self.members.append(member)
        await self._start(member)
        await _ended(member)
        self.members.remove(member)
        return member.returncode or 0

    async def settle(self, ready: Coroutine[None, None, None]) -> None:
        """Wait for `ready`. Raises StackError if a role repeatedly fails to start."""
        waiting = asyncio.create_task(ready)
        not_starting = asyncio.create_task(self._not_starting.wait())
        try:
            await asyncio.wait([waiting, not_starting], return_when=asyncio.FIRST_COMPLETED)
            if self._not_starting.is_set():
                raise StackError(self._start_failure)
            await waiting
        finally:
            waiting.cancel()
            not_starting.cancel()

    async def stop(self) -> None:
        """Stop everything, group by group. No effect when nothing runs."""
        keepers = list(self._keepers.values())
        for supervisor in keepers:
            supervisor.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for roles, grace_s in STOP_STAGES:
            stage = [member.stop(self._longest_s(member, grace_s)) for member in self.members if member.role in roles]
            await asyncio.gather(*stage)

    def _longest_s(self, member: ChildProcess, grace_s: float) -> float:
        return grace_s + (self._drain_s if member.role in DRAINING else 0.0)

    def kill(self) -> None:
        """Kill everything at once; a running `stop` then ends quickly."""
        for member in self.members:
            member.kill()

    async def _start(self, member: ChildProcess) -> None:
        await member.start()
        self._guard.hold(member.pid)
        self._changed()

    async def _keep(self, member: ChildProcess) -> None:
        backoff = RestartBackoff()
        failed_starts = 0
        while True:
            started = time.monotonic()
            await _ended(member)
            failed_starts += (member.returncode or 0) > 0
            if not self._start_failure and (member.returncode == USAGE_EXIT_CODE or failed_starts >= TRIALS):
                self._start_failure = f"{member.name} does not run ({_cause(member.returncode)}); see the log above."
                self._not_starting.set()
            failed = member.returncode is None or member.returncode > 0
            delay = backoff.delay_after(time.monotonic() - started, failed=failed)
            when = f"in {delay:.1f} s" if delay else "now"
            self._lines.say(f"{member.name} ended ({_cause(member.returncode)}); starting it again {when}")
            self._changed()
            await asyncio.sleep(delay)
            try:
                await self._start(member)
            except (EmbeddedServerError, OSError) as error:
                self._lines.say(f"{member.name} does not start: {error}")


async def _ended(member: ChildProcess) -> None:
    while member.alive:  # noqa: ASYNC110 - a process has no event to wait for
        await asyncio.sleep(WATCH_S)


def _cause(returncode: int | None) -> str:
    if returncode is None:
        return "not started"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
