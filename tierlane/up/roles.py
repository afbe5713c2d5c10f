"""The commands and environments of the roles that `up` starts. Secrets travel in the environment, never in argv."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import SecretStr

from scheduler.protocol.direct import direct_token
from tierlane.settings.descriptions import CONFIG_VARIABLE, UP, variable
from tierlane.settings.model import Settings
from tierlane.torch_threads import default_torch_threads
from tierlane.up.other_pools import parse_pools

NOT_A_ROLES = {CONFIG_VARIABLE, *(variable(setting) for setting in UP)}
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
        values = {setting: value for setting, value in self.settings if value is not None and setting not in UP}
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
