"""What a stack is made of: one member for each process, servers and roles alike, with the same verbs."""

import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from tierlane.child_process import ChildProcess
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane.up.log_lines import LogLines


class Member(Protocol):
    """A process of the stack. `role` and `name` are what stack.json calls it."""

    role: str
    name: str

    @property
    def pid(self) -> int:
        """Process id of the latest run."""

    @property
    def alive(self) -> bool:
        """Whether it runs now."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run, None while it runs."""

    async def start(self) -> None:
        """Start it; returns when it runs (a server: when it answers)."""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, kill it after `grace_s` seconds."""

    def kill(self) -> None:
        """Kill it at once."""


class ServerMember:
    """An embedded server as a member."""

    def __init__(self, role: str, server: EmbeddedRedis | EmbeddedPostgres) -> None:
        """`role`: redis or postgres; there is one of each, so it is the name too."""
        self.role = role
        self.name = role
        self._server = server

    @property
    def pid(self) -> int:
        """Process id of the latest run."""
        return self._server.pid

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self._server.alive

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run, None while it runs."""
        return self._server.returncode

    async def start(self) -> None:
        """Start it and wait until it answers. Raises EmbeddedServerError."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, kill it after `grace_s` seconds."""
        await self._server.stop(grace_s)

    def kill(self) -> None:
        """Kill it at once."""
        self._server.kill()


class RoleMember:
    """A role of ours as a member: a command with an environment, whose output is prefixed and shown."""

    def __init__(self, role: str, name: str, argv: Sequence[str], env: Mapping[str, str], lines: LogLines) -> None:
        """`env` is the whole environment; secrets go there, never on the command line."""
        self.role = role
        self.name = name
        self._argv = argv
        self._env = env
        self._lines = lines
        self._child = ChildProcess()

    @property
    def pid(self) -> int:
        """Process id of the latest run."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self._child.alive

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run, None while it runs."""
        return self._child.returncode

    async def start(self) -> None:
        """Spawn it. Whether it is of use is for its readiness to say."""
        self._lines.pump(self.name, self._child.spawn_piped(self._argv, self._env))

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds."""
        await self._child.stop(signal.SIGTERM, grace_s)

    def kill(self) -> None:
        """Kill it at once, with its model process."""
        self._child.kill()
