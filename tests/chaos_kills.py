"""Processes of a running stack that are killed at set times, and the connections that a killed gateway had."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from eventually import eventually
from stack import Stack

ACCEPTED_LATE_S = 0.3
"""Connections that a client opened this long before the death of a gateway may not have been accepted yet."""


@dataclass
class Kills:
    """What was killed so far, and when (monotonic seconds); `cut` are the client ports of the killed gateways."""

    stack: Stack
    at_s: dict[str, float] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)

    async def run(self, plan: Sequence[tuple[float, str, str]]) -> None:
        """Kill these processes (role and name), each so many seconds after the start, and wait until it is replaced."""
        began = time.monotonic()
        for seconds, role, name in plan:
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
            pid = self.stack.pids(role)[name]
            if role == "gateway":
                os.kill(pid, signal.SIGSTOP)  # So that it accepts no connection after they were listed.
                self.cut |= self._clients_of(pid)
            os.kill(pid, signal.SIGKILL)
            self.at_s[role] = time.monotonic()
            await eventually(
                lambda role=role, name=name, pid=pid: self.stack.pids(role).get(name, pid) != pid,  # type: ignore[misc]
                f"another {role}",
                20.0,
            )

    def _clients_of(self, pid: int) -> set[int]:
        """The ports of the clients of this gateway, and of connections that no gateway has accepted yet."""
        port = urlsplit(self.stack.url).port
        return {
            each.raddr.port
            for each in psutil.net_connections("tcp")
            if each.laddr and each.laddr.port == port and each.raddr and each.pid in (pid, None)
        }

    def broke(self, port: int, opened_s: float) -> bool:
        """Whether the client with this port, which connected at this time, had a connection to a killed gateway."""
        killed_s = self.at_s.get("gateway")
        if killed_s is None:
            return False
        return port in self.cut or killed_s - ACCEPTED_LATE_S <= opened_s <= killed_s + ACCEPTED_LATE_S
