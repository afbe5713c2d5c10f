"""The plan of a run: its options, checked. A wrong option is reported in one sentence that names it."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from tierlane.command import OptionReader
from tierlane_tools.bench.command import TOOL
from tierlane_tools.bench.plan.arrivals import Arrivals
from tierlane_tools.bench.plan.inputs import filler_of
from tierlane_tools.bench.plan.mix import Mix, MixError, parse_mix
from tierlane_tools.bench.plan.objectives import Objective, SloError, parse_share, parse_slo
from tierlane_tools.bench.verification.output_check import Verify

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


class EchoMode(StrEnum):
    """Whether a bare echo is measured beside the stack."""

    AUTO = "auto"
    """If the stack file names gateways."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class BenchPlan:
    """The options, checked. Times in seconds; `url` is empty when the stack file shall say."""

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


def read_plan(given: Mapping[str, str | None]) -> BenchPlan:
    """Check all options; those of None have their default. Raises UsageError."""
    return _PlanReader(TOOL, given, BenchUsageError).plan()


class _PlanReader(OptionReader):
    def plan(self) -> BenchPlan:
        mix = self._parsed("mix", parse_mix)
        text = self.text("input")
        share = self.text("max_error_rate")
        return BenchPlan(
            url=self.text("url"),
            stack=Path(self.text("stack")),
            mode=self._choice("mode", LoadMode),
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
            verify=self._choice("verify", Verify),
            audit_wait=self.number("audit_wait"),
            seed=self.integer("seed") if self.text("seed") else secrets.randbits(32),
            slo=self._parsed("slo", lambda value: parse_slo(value, mix.tiers)),
            max_error_rate=self._parsed("max_error_rate", parse_share) if share else None,
            echo=self._choice("echo", EchoMode),
            json=self.path("json"),
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


def read_address(url: str) -> TargetAddress:
    """Take a URL apart; its path, if any, goes before `/v1/inference`. Raises UsageError."""
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
    return TargetAddress(parts.hostname, port, parts.netloc, parts.path.rstrip("/") + "/v1/inference")
