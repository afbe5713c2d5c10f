"""The settings as one pydantic model, where each value comes from, and the error for a bad one.

Each setting is declared in `gateway_sections` or `role_sections`. Precedence: flag > environment > file > default. They
are read once, here, and handed down as plain values. A bad one stops the process with one line that names the variable,
what it must be, what it was, and where it was set.
"""

import inspect
import os
import re
import socket
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from gateway.auth.client_address import Network, networks_of
from gateway.host_lists import host_list, origin_list
from gateway.jobs.webhook_security import secret_bytes
from ratelimit.request_limits import LANGUAGE_MODEL, RequestLimits, limits_of_backend
from scheduler.autoscale import ScaleRules
from tierlane.settings.checks import MAX_WORKERS, parse_bounds
from tierlane.settings.declaration import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, PREFIX, flag, settings_of, variable
from tierlane.settings.pools import PoolsError, parse_pools
from tierlane.settings.role_sections import EndpointSettings
from tierlane.settings.sections import ORDERED, SETTINGS, AllSettings

MAX_SHOWN_CHARS = 80
Config = TypeVar("Config")

# Variables that belong to the tools, not to a role; they read them by themselves.
FOREIGN_PREFIXES = (
    "TIERLANE_ACTOR",
    "TIERLANE_ADMIN_LIMIT",
    "TIERLANE_ADMIN_OUTPUT",
    "TIERLANE_BENCH_",
    "TIERLANE_CHAOS_",
    "TIERLANE_CHECK_",
    "TIERLANE_DLQ_",
    "TIERLANE_EXPLAIN_",
    "TIERLANE_SIMULATE_",
    "TIERLANE_TEST_",
    "TIERLANE_TOP_",
)


class SettingsError(Exception):
    """A setting is missing, unknown, of the wrong type or contradicts another; the message is one line."""


def first_error(error: ValidationError, model: type[BaseModel], origin: Callable[[str], str]) -> str:
    """Return the line for the first fault; `origin` says where a setting was set."""
    fault = error.errors(include_url=False)[0]
    if not fault["loc"]:
        return str(fault["ctx"]["error"])  # A rule between settings, which names its variables itself.
    name = str(fault["loc"][0])
    if fault["type"] == "value_error":
        demand = str(fault["ctx"]["error"])
    else:
        demand = _demand(model.model_json_schema()["properties"][name]) or fault["msg"]
    got = ""
    if model.model_fields[name].repr:  # URLs and tokens are not shown, since they may hold passwords.
        shown = repr(fault["input"])
        got = f", got {shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + '...'}"
    return f"{variable(name)}: {demand}{got}{origin(name)}"


def unknown_name(name: str, similar: Sequence[str]) -> str:
    """Return the line for a name that is no setting, with the nearest known one."""
    return f"{name}: is not a setting of Tierlane" + (f"; did you mean {similar[0]}?" if similar else "")


def _demand(schema: Mapping[str, Any]) -> str:
    schema = schema.get("anyOf", [schema])[0]  # An optional setting is written as "this type or null".
    match schema:
        case {"type": "integer" | "number" as kind, "minimum": least, "maximum": most}:
            return f"must be {'an' if kind == 'integer' else 'a'} {kind} from {least} to {most}"
        case {"type": "boolean"}:
            return "must be true or false"
        case {"enum": choices}:
            return f"must be one of {', '.join(choices)}"
        case {"pattern": pattern}:
            return f"must match {pattern}"
        case {"minLength": 1}:
            return "must not be empty"
    return ""


class Settings(AllSettings, BaseSettings):
    """All settings; a role uses those of its section. An empty URL or token means that it is not set.

    pydantic makes a field of each annotation in these classes, and takes its default and range from the
    `dataclasses.Field` that `setting` returns.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=True
    )

    @property
    def own_name(self) -> str:
        """The name of this gateway or scheduler."""
        return self.process_name or re.sub(r"[^A-Za-z0-9_.-]", "_", f"{socket.gethostname()}-{os.getpid()}")

    @property
    def session_url(self) -> str:
        """The database for connections that need their session: LISTEN, advisory locks, migrations, commands."""
        return self.database_direct_url or self.database_url

    @property
    def statement_url(self) -> str:
        """The database for statements and transactions, which may each run in another session."""
        if not self.database_direct_url:
            return self.database_url
        from ledger.postgres import pooled  # noqa: PLC0415 - workers never need asyncpg

        return pooled(self.database_url)

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        """The origins one by one."""
        return origin_list(self.cors_origins)

    @property
    def proxy_networks(self) -> tuple[Network, ...]:
        """The networks of load balancers one by one."""
        return networks_of(self.trusted_proxies)

    @property
    def callback_host_list(self) -> tuple[str, ...]:
        """The hosts one by one."""
        return host_list(self.callback_hosts)

    @property
    def callback_key(self) -> bytes:
        """The key from which those that sign callbacks are derived; empty where callbacks are refused."""
        secret = self.callback_secret.get_secret_value()
        return secret_bytes(secret) if secret else b""

    @property
    def endpoint_values(self) -> dict[str, Any]:
        """The settings of the endpoint that are set, as `Access` in gpu_pool has them."""
        values = {name.removeprefix("endpoint_"): getattr(self, name) for name in settings_of(EndpointSettings)}
        return {
            name: str(value) if isinstance(value, Path) else _revealed(value)
            for name, value in values.items()
            if value is not None
        }

    def config_of(self, config: Callable[..., Config], prefix: str = "", **derived: object) -> Config:
        """The config of a role: a field that is not `derived` has the value of the setting of its name, after `prefix`."""
        fields = (name for name in inspect.signature(config).parameters if prefix + name in SETTINGS)
        values = {name: getattr(self, prefix + name) for name in fields} | derived
        return config(**{name: _revealed(value) for name, value in values.items()})

    def request_limits(self, of_backend: RequestLimits) -> RequestLimits:
        """The limits of a request in a pool whose backend has these."""
        return of_backend.override(self.total_request_ms, self.max_body_bytes)

    @property
    def longest(self) -> RequestLimits:
        """The limits of a request in the pool with the longest and largest ones that there can be."""
        return self.request_limits(LANGUAGE_MODEL)

    @property
    def gateway_count(self) -> int:
        """The number of gateways to start: the setting, else two, or one where both would share a single core."""
        return self.gateways or min(2, os.cpu_count() or 1)

    @property
    def scale_bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of workers of a pool."""
        return parse_bounds(self.autoscale) if self.autoscale else (1, MAX_WORKERS)

    @property
    def scale_rules(self) -> ScaleRules:
        """The parameters of the scale policy."""
        least, most = self.scale_bounds
        return ScaleRules(
            least=least,
            most=most,
            target_wait_s=self.autoscale_wait_ms / 1000,
            need_s=self.autoscale_need_ms / 1000,
            deep_s=self.autoscale_deep_ms / 1000,
            long_s=self.autoscale_long_ms / 1000,
            busy_s=self.autoscale_busy_ms / 1000,
            calm_s=self.autoscale_calm_ms / 1000,
            cooldown_s=self.autoscale_cooldown_ms / 1000,
        )

    @field_validator("*")
    @classmethod
    def _check_one(cls, value: Any, info: ValidationInfo) -> Any:
        check = SETTINGS[info.field_name or ""].check
        return check(value) if check else value

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        try:
            parse_pools(self.pools, self.pool)
        except PoolsError as error:
            raise ValueError(f"{variable('pools')}: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name, setting in SETTINGS.items():
            if setting.needs and _is_set(getattr(self, name)) and not _is_set(getattr(self, setting.needs)):
                raise ValueError(f"{variable(setting.needs)}: must be set where {variable(name)} is")
        return self

    @model_validator(mode="after")
    def _check_gateway(self) -> Self:
        if self.grpc_port and self.grpc_port == self.port:
            raise ValueError(f"{variable('grpc_port')}: must not be {variable('port')} ({self.port})")
        if self.jwt_jwks and not (self.jwt_audience or self.jwt_issuer):
            raise ValueError(
                f"{variable('jwt_audience')}: must be set, or {variable('jwt_issuer')}, where {variable('jwt_jwks')} is, so "
                "that tokens for others are rejected"
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for smaller, larger, why in ORDERED:
            low, high = getattr(self, smaller), getattr(self, larger)
            if high is None:  # The total time of a request is that of the backend where it is not set.
                high = limits_of_backend(self.backend).total_ms
            if low is not None and low >= high:
                raise ValueError(
                    f"{variable(smaller)}: must be less than {variable(larger)} ({high}), got {low}, {why}"
                )
        return self


def _revealed(value: object) -> object:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    required: Sequence[str] = (),
) -> Settings:
    """Read the settings; `flags` of None count as not given, `required` names settings that must not be empty.

    Raises SettingsError, whose text is one line that names the variable and what to do.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    path = config
    if path is None and (named := os.environ.get(CONFIG_VARIABLE)):
        path = Path(named)
    elif path is None and Path(DEFAULT_CONFIG_FILE).is_file():
        path = Path(DEFAULT_CONFIG_FILE)
    file_values = _read_file(path) if path else {}
    known = {name.upper() for name in (*Settings.model_fields, "config")}
    for name in os.environ:
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and not name.startswith(FOREIGN_PREFIXES) and own not in known:
            # Compared without the prefix, which would make everything look similar.
            similar = [PREFIX + match for match in get_close_matches(own, sorted(known), 1)]
            raise SettingsError(unknown_name(name, similar))
    try:
        settings = Settings.model_validate(file_values | EnvSettingsSource(Settings)() | given)
    except ValidationError as error:
        raise SettingsError(first_error(error, Settings, origin=lambda name: _origin(name, given, path))) from None
    for name in required:
        if not _is_set(getattr(settings, name)):
            raise SettingsError(f"{variable(name)}: is not set; {SETTINGS[name].description}")
    return settings


def _origin(name: str, given: Container[str], path: Path | None) -> str:
    """Say where a setting was set; nothing for the environment, whose variable the line begins with."""
    if name in given:
        return f" (set by {flag(name)})"
    if variable(name) in os.environ or path is None:
        return ""
    return f" (set in {path})"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: {path} is not valid TOML: {error}") from None
    for name in values:
        if name not in Settings.model_fields:
            raise SettingsError(unknown_name(f"{path}: {name}", get_close_matches(name, SETTINGS, 1)))
    return values


def _is_set(value: object) -> bool:
    return bool(_revealed(value))
