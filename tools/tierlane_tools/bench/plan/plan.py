"""The plan of a run: its options, checked. A wrong option is reported in one sentence that names it."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tierlane.command import OptionReader
from tierlane_tools.bench.command import TOOL
from tierlane_tools.bench.plan.arrivals import Arrivals
from tierlane_tools.bench.plan.inputs import filler_of
from tierlane_tools.bench.plan.mix import Mix, MixError, parse_mix
from tierlane_tools.bench.plan.objectives import Objective, SloError, parse_share, parse_slo
from tierlane_tools.bench.verification.output_check import Verify
from tierlane_tools.traces.plan import TraceOptions, read_trace_options
from tierlane_tools.traces.replay import ReplayedRequest

TRACE_CONNECTIONS, TRACE_TIMEOUT_S = "4096", "600"
"""Defaults with a trace, whose answers may take minutes."""

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class BenchUsageError(Exception):
    """An option is wrong; the message is one sentence that names it."""


@dataclass(frozen=True)
class TargetAddress:
    """Where to connect and what to ask for; `authority` is the Host header."""

    host: str
    port: int
    authority: str
    path: str


class LoadMode(StrEnum):
    """Who decides when the next request is sent."""

    OPEN = "open"
    """The schedule."""
    CLOSED = "closed"
    """The answer to the one before."""


class TraceApi(StrEnum):
    """The endpoint for the requests of a trace."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """Its path."""
        return "/v1/chat/completions" if self is TraceApi.CHAT else "/v1/completions"


class EchoMode(StrEnum):
    """Whether a bare echo is measured beside the stack."""

    AUTO = "auto"
    """If the stack file names gateways."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class BenchPlan:
    """The options, checked. Times in seconds; `url` is empty when the stack file shall say.

    `requests` and `notes`: of the trace, once its file was read. `measures_all`: the duration is that of the trace.
    """

    url: str
    stack: Path
    mode: LoadMode
    rate: float
    duration: float
    warmup: float
    mix: Mix
    keys: Path | None
    arrivals: Arrivals
    filler: str
    model: str | None
    connections: int
    timeout: float
    verify: Verify
    audit_wait: float
    seed: int
    slo: tuple[Objective, ...]
    max_error_rate: float | None
    echo: EchoMode
    json: Path | None
    trace: TraceOptions | None = None
    measures_all: bool = False
    trace_api: TraceApi = TraceApi.CHAT
    token_bytes: int = 4
    ignore_eos: bool = False
    requests: Sequence[ReplayedRequest] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def read_plan(given: Mapping[str, Any]) -> BenchPlan:
    """Check all options; those of None have their default. Raises UsageError."""
    options = {name: value for name, value in given.items() if not TOOL.options[name].switch}
    if options.get("trace"):
        defaults = {"connections": TRACE_CONNECTIONS, "timeout": TRACE_TIMEOUT_S}
        options = {**options, **{name: value for name, value in defaults.items() if options.get(name) is None}}
    plan = _PlanReader(TOOL, options, BenchUsageError).plan()
    measures_all = options.get("duration") is None
    return replace(plan, ignore_eos=bool(given.get("ignore_eos")), measures_all=measures_all)


class _PlanReader(OptionReader):
    def plan(self) -> BenchPlan:
        mix = self._parsed("mix", parse_mix)
        text = self.text("input")
        share = self.text("max_error_rate")
        seed = self.integer("seed") if self.text("seed") else secrets.randbits(32)
        trace = read_trace_options(self, mix, seed)
        mode, verify, echo = (
            self._choice("mode", LoadMode),
            self._choice("verify", Verify),
            self._choice("echo", EchoMode),
        )
        if trace is not None:
            mix = trace.mix
            for option, value in (("mode", LoadMode.CLOSED), ("verify", Verify.REVERSED), ("echo", EchoMode.ON)):
                if value in (mode, verify, echo):
                    raise self.fault(option, f"{value} is not possible with --trace.")
            verify, echo = Verify.OFF, EchoMode.OFF
        return BenchPlan(
            url=self.text("url"),
            stack=Path(self.text("stack")),
            mode=mode,
            rate=self.number("rate", positive=True),
            duration=self.number("duration", positive=True),
            warmup=self.number("warmup"),
            mix=mix,
            keys=self.path("keys"),
            arrivals=self._choice("arrivals", Arrivals),
            filler=" " + text if text else filler_of(self.integer("input_bytes")),
            model=self.text("model") or None,
            connections=self.integer("connections"),
            timeout=self.number("timeout", positive=True),
            verify=verify,
            audit_wait=self.number("audit_wait"),
            seed=seed,
            slo=self._parsed("slo", lambda value: parse_slo(value, mix.tiers)),
            max_error_rate=self._parsed("max_error_rate", parse_share) if share else None,
            echo=echo,
            json=self.path("json"),
            trace=trace,
            trace_api=self._choice("trace_api", TraceApi),
            token_bytes=self.integer("token_bytes"),
        )

    def _parsed(self, option: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(self.text(option))
        except (MixError, SloError) as error:
            raise self.fault(option, f"{error}.") from None

    def _choice(self, option: str, kind: type[E]) -> E:
        text = self.text(option)
        try:
            return kind(text)
        except ValueError:
            raise self.fault(option, f"must be one of {', '.join(kind)}, got {text!r}.") from None


def read_address(url: str, endpoint: str = "/v1/inference") -> TargetAddress:
    """Take a URL apart; its path, if any, goes before the endpoint. Raises UsageError."""
    where = TOOL.both_names("url")
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise BenchUsageError(f"{where}: {url!r} is not a URL: {error}.") from None
    if parts.scheme != "http" or not parts.hostname or not url.isascii() or not url.isprintable():
        raise BenchUsageError(f"{where}: must be http://HOST:PORT (plain TCP, no TLS), got {url!r}.")
    if parts.username or parts.query or parts.fragment:
        raise BenchUsageError(f"{where}: must hold no user, query or fragment.")
    return TargetAddress(parts.hostname, port, parts.netloc, parts.path.rstrip("/") + endpoint)
