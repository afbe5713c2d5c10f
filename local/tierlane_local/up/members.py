"""The role processes of a stack: commands and environments."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from scheduler.protocol.direct import direct_token
from tierlane.settings.declaration import CONFIG_VARIABLE, settings_of, variable
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_torch_threads, parse_pools
from tierlane.settings.role_sections import StackSettings
from tierlane.settings.sections import SETTINGS
from tierlane_local.child_process import ChildProcess
from tierlane_local.up.data_dir import LogLines
from tierlane_local.up.orphan_guard import REMOVABLE_PREFIX, SHARED_MEMORY

STACK_ONLY = frozenset(settings_of(StackSettings))
NOT_A_ROLES = {CONFIG_VARIABLE, *(variable(setting) for setting in STACK_ONLY)}
"""Variables of the stack only: with them, a worker of an additional pool would find its own pool in the list."""

_HIDDEN = ("service_token", "database_url", "callback_secret")
NOT_A_WORKERS = {
    *(variable(setting) for setting in _HIDDEN),
    *(variable(name) for name, setting in SETTINGS.items() if setting.needs in _HIDDEN),
}
"""Variables that a worker does not need, hidden from the code of its model, and those that must not be set without them."""

Command = Callable[[str], list[str]]


class RoleMember(ChildProcess):
    """A process of a role. Its output is written with its name as prefix."""

    def __init__(self, role: str, name: str, argv: Sequence[str], env: Mapping[str, str], lines: LogLines) -> None:
        """`env` is the complete environment. Secrets are passed in it, never in `argv`."""
        super().__init__(role, name)
        self._argv = argv
        self._env = env
        self._lines = lines

    async def start(self) -> None:
        """Start the process; it may not be ready yet."""
        self._lines.pump(self.name, self.spawn_piped(self._argv, self._env))


def role_command(role: str) -> list[str]:
    """The command line of a role.

    Only a worker can import from the current directory, because its backend may be there. For the other roles, a
    directory called `gateway` or `ledger` must not shadow the installed package.
    """
    safe_path = [] if role == "worker" else ["-P"]
    return [sys.executable, *safe_path, "-m", "tierlane", role]


@dataclass(frozen=True)
class RoleEnvironment:
    """The environments of the processes of a stack; `command` returns the argv of a role."""

    settings: Settings
    command: Command = role_command

    def member(
        self, role: str, name: str, lines: LogLines, overrides: Mapping[str, object] | None = None
    ) -> RoleMember:
        """The process `name`, not started."""
        return RoleMember(role, name, self.command(role), self.for_role(role, name, overrides), lines)

    def for_role(self, role: str, name: str, overrides: Mapping[str, object] | None = None) -> dict[str, str]:
        """The complete environment of the process `name`; `overrides` are its own settings."""
        settings = self.settings
        env = {key: value for key, value in os.environ.items() if key not in NOT_A_ROLES}
        # All values are passed, so that the role does not read the settings file again with another precedence.
        values = {setting: value for setting, value in settings if value is not None and setting not in STACK_ONLY}
        # Separate directories, because the audit spool of a gateway has one writer.
        values["data_dir"] = settings.data_dir / name
        values.setdefault("metrics_dir", settings.data_dir / "metrics")  # Gateways on one port sum their counters.
        values.setdefault("body_dir", body_dir(settings.data_dir))
        values["notice_ms"] = 0  # There is no load balancer.
        if role in ("gateway", "scheduler", "admin"):
            values["process_name"] = name
        if role == "worker":  # It runs the code of the model.
            env = {key: value for key, value in env.items() if key not in NOT_A_WORKERS}
            values["worker_id"] = name
            token = settings.service_token.get_secret_value()
            values["direct_token"] = settings.direct_token.get_secret_value() or direct_token(token)
            values = {setting: value for setting, value in values.items() if variable(setting) not in NOT_A_WORKERS}
        values |= overrides or {}
        if role == "worker":
            own = settings.scale_bounds[1] if settings.autoscale else settings.workers
            workers = own + sum(pool.workers for pool in parse_pools(settings.pools, settings.pool))
            values.setdefault("torch_threads", default_torch_threads(str(values.get("backend", "")), workers))
        env |= {variable(setting): _text(value) for setting, value in values.items()}
        env[CONFIG_VARIABLE] = os.devnull  # All settings are here; the default file may have those of the stack only.
        env["PYTHONUNBUFFERED"] = "1"  # Otherwise the last output of a killed role is lost.
        return env


def body_dir(data_dir: Path) -> Path:
    """The directory of large chats: in shared memory where there is one, else with the other data."""
    if os.access(SHARED_MEMORY, os.W_OK):
        mark = hashlib.sha256(str(data_dir.absolute()).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"{REMOVABLE_PREFIX}{os.getuid()}-{mark}"
    return data_dir / "bodies"


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)
