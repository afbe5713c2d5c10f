"""Keeps members running: starts them, restarts what dies after a backoff, stops all within five seconds."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from tierlane.embedded import EmbeddedServerError
from tierlane.up.data_dir import LogLines, StackError
from tierlane.up.members import StackMember
from tierlane.up.orphan_guard import OrphanGuard

FIRST_S = 0.2
LONGEST_S = 5.0
SERVED_S = 1.0  # A role serves after less than half of this; who lived so long had started.
STEADY_S = 10.0  # A role that ends by its own fault after so long had started well, too.


class RestartBackoff:
    """Delays in seconds that double from `FIRST_S` to `LONGEST_S` while starts fail.

    A process that was ended from outside after it had served is no failed start: it is started again at once.
    """

    def __init__(self) -> None:
        """Start at the first delay."""
        self._next_s = FIRST_S

    def delay_after(self, alive_s: float, *, failed: bool) -> float:
        """Return the delay before the next start, given how many seconds the process was alive.

        `failed`: it ended by itself with an error, not by a signal (nor by obeying one, which is exit code 0).
        """
        if alive_s >= (STEADY_S if failed else SERVED_S):
            self._next_s = FIRST_S
            if not failed:
                return 0.0
        delay = self._next_s
        self._next_s = min(delay * 2, LONGEST_S)
        return delay


WATCH_S = 0.05
USAGE_EXIT_CODE = 2  # A role that refuses its settings would refuse them again.
TRIALS = 4  # So often may a process end by itself before the stack is ready.

# Who is stopped together, in this order, with the seconds each group has before it is killed; under 5 in all.
# Gateways first, while there is still something behind them that can answer what they have accepted.
STOP_STAGES: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"gateway"}), 2.0),
    (frozenset({"worker", "scheduler", "migrate"}), 1.5),
    (frozenset({"redis", "postgres"}), 0.8),
)


class Supervisor:
    """The running members. `changed` is called whenever the set of processes is another one."""

    def __init__(self, leash: OrphanGuard, lines: LogLines, changed: Callable[[], None]) -> None:
        """`leash` is told of every process, so that none can be left behind."""
        self._leash = leash
        self._lines = lines
        self._changed = changed
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._refused = asyncio.Event()
        self._refusal = ""
        self.members: list[StackMember] = []

    async def add(self, member: StackMember) -> None:
        """Start a member and keep it running from now on. Raises what its first start raises."""
        self.members.append(member)
        await self._start(member)
        self._keepers[member.name] = asyncio.create_task(self._keep(member), name=f"keep {member.name}")

    async def remove(self, member: StackMember, grace_s: float) -> None:
        """Tell a member to leave, kill it after `grace_s` seconds, and forget it. It is not started again meanwhile."""
        supervisor = self._keepers.pop(member.name)
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        await member.stop(grace_s)
        self.members.remove(member)
        self._changed()

    async def run_once(self, member: StackMember) -> int:
        """Start a member that is to end by itself, and return its exit code."""
        self.members.append(member)
        await self._start(member)
        await _ended(member)
        self.members.remove(member)
        return member.returncode or 0

    async def settle(self, ready: Coroutine[None, None, None]) -> None:
        """Wait for `ready`; a role that keeps refusing to run ends the waiting. Raises StackError."""
        waiting = asyncio.create_task(ready)
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait([waiting, refused], return_when=asyncio.FIRST_COMPLETED)
            if self._refused.is_set():
                raise StackError(self._refusal)
            await waiting
        finally:
            waiting.cancel()
            refused.cancel()

    async def stop(self) -> None:
        """Stop everything, stage by stage; harmless when nothing runs."""
        keepers = list(self._keepers.values())
        for supervisor in keepers:
            supervisor.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for roles, grace_s in STOP_STAGES:
            stage = [member.stop(grace_s) for member in self.members if member.role in roles]
            await asyncio.gather(*stage)

    def kill(self) -> None:
        """Kill everything at once; a `stop` that is under way then ends quickly."""
        for member in self.members:
            member.kill()

    async def _start(self, member: StackMember) -> None:
        await member.start()
        self._leash.hold(member.pid)
        self._changed()

    async def _keep(self, member: StackMember) -> None:
        backoff = RestartBackoff()
        refusals = 0
        while True:
            started = time.monotonic()
            await _ended(member)
            refusals += (member.returncode or 0) > 0
            if not self._refusal and (member.returncode == USAGE_EXIT_CODE or refusals >= TRIALS):
                self._refusal = f"{member.name} does not run ({_cause(member.returncode)}); its message is above."
                self._refused.set()
            failed = member.returncode is None or member.returncode > 0
            delay = backoff.delay_after(time.monotonic() - started, failed=failed)
            when = f"in {delay:.1f} s" if delay else "now"
            self._lines.say(f"{member.name} ended ({_cause(member.returncode)}); starting it again {when}")
            self._changed()
            await asyncio.sleep(delay)
            await self._start_again(member)

    async def _start_again(self, member: StackMember) -> None:
        try:
            await self._start(member)
        except (EmbeddedServerError, OSError) as error:
            self._lines.say(f"{member.name} does not start: {error}")


async def _ended(member: StackMember) -> None:
    while member.alive:  # noqa: ASYNC110 - a process has no event to wait for
        await asyncio.sleep(WATCH_S)


def _cause(returncode: int | None) -> str:
    if returncode is None:
        return "not started"
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
