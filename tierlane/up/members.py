"""The processes of a stack, servers and roles alike: their commands, environments and model processes.

Secrets travel in the environment, never in argv. A worker starts its own model process, so that is found among the
worker's descendants.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil
from pydantic import SecretStr

from scheduler.protocol.direct import direct_token
from tierlane.child_process import ChildProcess, still_runs
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane.settings.declaration import CONFIG_VARIABLE, settings_of, variable
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_torch_threads, parse_pools
from tierlane.settings.role_sections import StackSettings
from tierlane.up.data_dir import LogLines


class StackMember(Protocol):
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


STACK_ONLY = frozenset(settings_of(StackSettings))
NOT_A_ROLES = {CONFIG_VARIABLE, *(variable(setting) for setting in STACK_ONLY)}
"""Variables that are about the stack: a worker of another pool would find its pool among the others."""

NOT_A_WORKERS = {variable(setting) for setting in ("service_token", "database_url", "callback_secret")}
"""Variables that a worker does not need, and that its model's code must not find."""

Command = Callable[[str], list[str]]

# A gateway may finish open requests for this long when the stack stops; all of it must end within five seconds.
DRAIN_MS = 1500


def role_command(role: str) -> list[str]:
    """Return the command line of a role.

    The current directory is importable for a worker only, whose backend may be a module of the user; for the other
    roles a folder that happens to be called `gateway` or `ledger` must not shadow ours.
    """
    safe_path = [] if role == "worker" else ["-P"]
    return [sys.executable, *safe_path, "-m", "tierlane", role]


@dataclass(frozen=True)
class RoleEnvironment:
    """The settings that all roles of one stack share; `for_role` gives the whole environment of one process."""

    settings: Settings

    def for_role(self, role: str, name: str, other: Mapping[str, object] | None = None) -> dict[str, str]:
        """Return the environment of the process `name`; `other`: settings in which it differs."""
        env = {key: value for key, value in os.environ.items() if key not in NOT_A_ROLES}
        values = self._values(role, name) | dict(other or {})
        if role == "worker":  # Code of others runs beside it.
            env = {key: value for key, value in env.items() if key not in NOT_A_WORKERS}
            backend = str(values.get("backend", ""))
            values.setdefault("torch_threads", default_torch_threads(backend, self._workers()))
        env |= {variable(setting): _text(value) for setting, value in values.items()}
        env["PYTHONUNBUFFERED"] = "1"  # Or what a role printed before it was killed would be lost.
        return env

    def _values(self, role: str, name: str) -> dict[str, object]:
        # Every value is passed, so that neither the file nor the environment is read a second time in another order.
        values = {setting: value for setting, value in self.settings if value is not None and setting not in STACK_ONLY}
        # A directory each, because the audit spool of a gateway has one writer.
        values["data_dir"] = self.settings.data_dir / name
        values.setdefault("metrics_dir", self.settings.data_dir / "metrics")  # Gateways on one port sum their counters.
        values["notice_ms"] = 0  # There is no load balancer that would have to notice.
        values["drain_ms"] = min(self.settings.drain_ms, DRAIN_MS)
        if role == "worker":
            values["worker_id"] = name
            token = self.settings.service_token.get_secret_value()
            values["direct_token"] = self.settings.direct_token.get_secret_value() or direct_token(token)
            values = {setting: value for setting, value in values.items() if variable(setting) not in NOT_A_WORKERS}
        return values

    def _workers(self) -> int:
        most = self.settings.scale_bounds[1] if self.settings.autoscale else self.settings.workers
        return most + sum(each.workers for each in parse_pools(self.settings.pools, self.settings.pool))


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)


# Helper processes of Python's multiprocessing, which are not models.
HELPERS = ("resource_tracker", "forkserver")


class ModelProcesses:
    """The model processes of all workers, as last seen. Asking is cheap while nothing has changed."""

    def __init__(self) -> None:
        """Know of none."""
        self._seen: dict[str, tuple[int, list[psutil.Process]]] = {}

    def of_worker(self, name: str, pid: int) -> list[psutil.Process]:
        """Return the model processes of the worker `name` that runs as `pid`, oldest first."""
        seen_pid, models = self._seen.get(name, (0, []))
        # Looking for children reads about every process of the machine, so only a loss is a reason to look again.
        if seen_pid != pid or not models or not all(still_runs(model) for model in models):
            models = _models_of(pid)
            self._seen[name] = (pid, models)
        return models


def _models_of(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child for child in children if still_runs(child) and not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return True
    return not command or any(helper in command for helper in HELPERS)
