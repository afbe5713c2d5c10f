"""The settings of every role: types, ranges, the rules between them, and their errors.

What each means is in `descriptions`. Precedence: flag > environment > file > default. They are read once, here, and
handed down as plain values. A bad one stops the process with one line that names the variable, what it must be, what it
was, and where it was set. `python -m tierlane.settings` prints the page for docs/.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from gateway.host_lists import origin_list
from scheduler.errors import StartError
from tierlane.settings.descriptions import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, PREFIX, TEXTS, flag, variable
from tierlane.settings.sections import EndpointSettings, JobSettings, PoolsError, ScaleSettings, parse_pools


class StackSettings(BaseSettings):
    """A part of `Settings`."""

    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "default"
    gateways: Annotated[int, Field(ge=1, le=64)] | None = None
    schedulers: Annotated[int, Field(ge=0, le=64)] = 2
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    pools: str = ""
    ephemeral: bool = False
    replace: bool = False

    @property
    def gateway_count(self) -> int:
        """How many gateways to start: the setting, else two, or one where both would share a single core."""
        return self.gateways or min(2, os.cpu_count() or 1)

    @model_validator(mode="after")
    def _pools_are_meant(self) -> Self:
        try:
            parse_pools(self.pools, self.pool)
        except PoolsError as error:
            raise ValueError(f"TIERLANE_POOLS: {error}") from None
        return self


class TraceSettings(BaseSettings):
    """A part of `Settings`."""

    traces_endpoint: Annotated[str, Field(repr=False)] = ""  # Somebody may try to put a password into it.
    traces_sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    traces_trust_callers: Literal["on", "off"] = "off"

    @field_validator("traces_endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must be an address alone; what it wants to be shown goes into OTEL_EXPORTER_OTLP_HEADERS")
        return value.rstrip("/")


MAX_SHOWN_CHARS = 80


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
    # URLs and tokens are marked as not for showing, since they may hold passwords.
    got = _got(fault["input"]) if model.model_fields[name].repr else ""
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


def _got(value: object) -> str:
    shown = repr(value)
    return f", got {shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + '...'}"


# Variables that belong to the tools, not to a role; they read them by themselves.
FOREIGN_PREFIXES = (
    "TIERLANE_ACTOR",
    "TIERLANE_ADMIN_",
    "TIERLANE_BENCH_",
    "TIERLANE_CHAOS_",
    "TIERLANE_CHECK_",
    "TIERLANE_DLQ_",
    "TIERLANE_EXPLAIN_",
    "TIERLANE_TEST_",
    "TIERLANE_TOP_",
)

MIN_TOKEN_CHARS = 16
REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
DATABASE_SCHEME = "postgresql+asyncpg://"

Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
BodyMemory = Annotated[int, Field(ge=1 << 20, le=1 << 40)]
# The name becomes part of Redis keys, where braces and colons have a meaning.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

# (smaller, larger, why): pairs of timings that only work when the first is less than the second.
ORDERED = (
    ("renew_ms", "lease_ms", "or a lease runs out before it is renewed"),
    ("reap_ms", "lease_ms", "or a lost batch waits longer for the reaper than for its lease"),
    ("heartbeat_ms", "gone_ms", "or a live worker counts as gone between two heartbeats"),
    ("gpu_timeout_ms", "total_request_ms", "or a request is answered before its batch is given up"),
    ("max_body_bytes", "key_body_memory_bytes", "or a body of that size is never read where it does not come at once"),
    ("key_body_memory_bytes", "customer_body_memory_bytes", "or one key of a customer keeps out all others"),
    ("customer_body_memory_bytes", "body_memory_bytes", "or one customer keeps out all others"),
    ("audit_interval_ms", "audit_grace_ms", "or requests are closed as abandoned before their rows are written"),
)


class Settings(JobSettings, EndpointSettings, ScaleSettings, StackSettings, TraceSettings):
    """All settings; a role uses those of its section. An empty URL or token means that it is not set."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    redis_url: Annotated[str, Field(repr=False)] = ""
    database_url: Annotated[str, Field(repr=False)] = ""
    service_token: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    direct_token: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    serve_pools: Literal["all", "own"] = "all"
    data_dir: Path = Path(".tierlane")
    # Never "auto" after loading.
    log_format: Annotated[Literal["auto", "console", "json"], Field(validate_default=True)] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 262_144
    body_memory_bytes: BodyMemory = 128 << 20
    customer_body_memory_bytes: BodyMemory = 32 << 20
    key_body_memory_bytes: BodyMemory = 16 << 20
    header_timeout_ms: Milliseconds = 5000
    body_timeout_ms: Milliseconds = 10_000
    idle_timeout_ms: Milliseconds = 75_000
    max_connections: Count = 20_000
    total_request_ms: Milliseconds = 4000
    notice_ms: Annotated[int, Field(ge=0, le=600_000)] = 2000
    drain_ms: Milliseconds = 4000
    default_model: str | None = None
    direct_mode: Literal["on", "off"] = "on"
    spool_max_bytes: Annotated[int, Field(ge=1 << 20, le=16 << 30)] = 64 << 20
    idempotency_keep_ms: Annotated[int, Field(ge=1000, le=604_800_000)] = 86_400_000
    idempotency_max_answers: Count = 10_000
    idempotency_max_bytes: Annotated[int, Field(ge=64 << 10, le=16 << 30)] = 16 << 20
    metrics_dir: Path | None = None
    request_log: Literal["on", "off"] = "off"

    cors_origins: str = ""
    auth_failures: Annotated[str, Field(min_length=1)] = "30/minute"
    jwt_jwks: str | None = None
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_algorithms: Annotated[str, Field(min_length=1)] = "RS256,ES256,EdDSA"
    jwt_customer_claim: Annotated[str, Field(min_length=1)] = "sub"

    lease_ms: Milliseconds = 600
    reap_ms: Milliseconds = 100
    batch_lookahead_workers: Count = 4
    batch_headroom: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    ageing_ms: Milliseconds = 1000

    backend: Annotated[str, Field(min_length=1)] = "tiny"
    worker_id: Name | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:[0-9]+)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    heartbeat_ms: Milliseconds = 250
    gone_ms: Milliseconds = 1000
    renew_ms: Milliseconds = 150
    gpu_timeout_ms: Milliseconds = 3000
    direct_host: str = "127.0.0.1"
    direct_port: Annotated[int, Field(ge=0, le=65535)] = 0
    direct_advertise: str = ""

    audit_batch: Count = 500
    audit_interval_ms: Milliseconds = 500
    audit_grace_ms: Milliseconds = 10_000

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        """The origins one by one."""
        return origin_list(self.cors_origins)

    @field_validator("cors_origins")
    @classmethod
    def _known_origins(cls, value: str) -> str:
        origin_list(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _known_redis_scheme(cls, value: str) -> str:
        if value and not value.startswith(REDIS_SCHEMES):
            raise ValueError("must begin with redis://, rediss://, unix:// or redis+sentinel://")
        if "+sentinel://" in value:
            _check_sentinel_url(value)
        return value

    @field_validator("database_url")
    @classmethod
    def _asyncpg_driver(cls, value: str) -> str:
        # A bare postgresql:// would make SQLAlchemy look for another driver, with an error that explains nothing.
        if value and not value.startswith(DATABASE_SCHEME):
            raise ValueError(f"must begin with {DATABASE_SCHEME}")
        return value

    @field_validator("service_token", "direct_token")
    @classmethod
    def _long_enough(cls, value: SecretStr) -> SecretStr:
        if 0 < len(value.get_secret_value()) < MIN_TOKEN_CHARS:
            raise ValueError(f"must have at least {MIN_TOKEN_CHARS} characters")
        return value

    @field_validator("direct_host")
    @classmethod
    def _empty_is_off(cls, value: str) -> str:
        return value or "off"  # Which an environment variable can say, too: an empty one counts as not set.

    @field_validator("log_format")
    @classmethod
    def _decide_log_format(cls, value: str) -> str:
        return ("console" if sys.stdout.isatty() else "json") if value == "auto" else value

    @model_validator(mode="after")
    def _timings_agree(self) -> Self:
        for smaller, larger, why in ORDERED:
            low, high = getattr(self, smaller), getattr(self, larger)
            if low >= high:
                raise ValueError(
                    f"{variable(smaller)}: must be less than {variable(larger)} ({high}), got {low}, {why}"
                )
        return self


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
    path = _config_path(config)
    file_values = _read_file(path) if path else {}
    _refuse_unknown_variables()
    try:
        settings = Settings.model_validate(file_values | EnvSettingsSource(Settings)() | given)
    except ValidationError as error:
        raise SettingsError(first_error(error, Settings, origin=lambda name: _origin(name, given, path))) from None
    for name in required:
        if not _is_set(getattr(settings, name)):
            raise SettingsError(f"{variable(name)}: is not set; {TEXTS[name].description}")
    return settings


def _origin(name: str, given: Container[str], path: Path | None) -> str:
    """Say where a setting was set; nothing for the environment, whose variable the line begins with."""
    if name in given:
        return f" (set by {flag(name)})"
    if variable(name) in os.environ or path is None:
        return ""
    return f" (set in {path})"


def _config_path(config: Path | None) -> Path | None:
    if config is None and (named := os.environ.get(CONFIG_VARIABLE)):
        config = Path(named)
    if config is not None:
        return config
    default = Path(DEFAULT_CONFIG_FILE)
    return default if default.is_file() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: {path} is not valid TOML: {error}") from None
    for name in values:
        if name not in Settings.model_fields:
            raise SettingsError(unknown_name(f"{path}: {name}", get_close_matches(name, TEXTS, 1)))
    return values


def _refuse_unknown_variables() -> None:
    known = {variable(name).removeprefix(PREFIX) for name in (*Settings.model_fields, "config")}
    for name in os.environ:
        if name.startswith(PREFIX) and not name.startswith(FOREIGN_PREFIXES):
            own = name.removeprefix(PREFIX)
            if own not in known:
                # Compared without the prefix, which would make everything look similar.
                similar = [PREFIX + match for match in get_close_matches(own, sorted(known), 1)]
                raise SettingsError(unknown_name(name, similar))


def _check_sentinel_url(url: str) -> None:
    from scheduler.redis_client.sentinel import parse  # noqa: PLC0415 - the Redis client takes long to load, and few need it here

    try:
        parse(url)
    except StartError as error:
        raise ValueError(str(error)) from None


def _is_set(value: object) -> bool:
    return bool(value.get_secret_value() if isinstance(value, SecretStr) else value)
