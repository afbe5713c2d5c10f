"""What one run shall do, from texts to checked values: every fault is told in one sentence that names the option."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from tierlane.bench.inputs import MIN_INPUT_BYTES, filler_of
from tierlane.bench.mix import Mix, MixError, parse_mix
from tierlane.bench.option_texts import OPTIONS, TOOL
from tierlane.bench.output_check import Verify
from tierlane.bench.schedule import Arrivals
from tierlane.bench.statistics import Objective, SloError, parse_share, parse_slo

MAX_INPUT_BYTES = 1 << 20
MAX_CONNECTIONS = 20_000
MAX_RATE = 1e6
MAX_SECONDS = 86_400.0

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class UsageError(Exception):
    """An option is wrong; the message is one sentence that names it."""


@dataclass(frozen=True)
class Address:
    """Where to connect and what to ask for; `authority` is the Host header."""

    host: str
    port: int
    authority: str
    path: str


class Mode(StrEnum):
    """Who decides when the next request is sent."""

    OPEN = "open"
    """The schedule."""
    CLOSED = "closed"
    """The answer to the one before."""


class Echo(StrEnum):
    """Whether a bare echo is measured beside the stack."""

    AUTO = "auto"
    """If the stack file names gateways."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Plan:
    """The options, checked. Times in seconds; `url` is empty when the stack file shall say."""

    url: str
    stack: Path
    mode: Mode
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
    echo: Echo
    report: Path | None
    json: Path | None


def read_plan(given: Mapping[str, str | None]) -> Plan:
    """Check all options; those of None have their default. Raises UsageError."""
    return _Reader(given).plan()


class _Reader:
    def __init__(self, given: Mapping[str, str | None]) -> None:
        self._given = given

    def plan(self) -> Plan:
        mix = self._parsed("mix", parse_mix)
        text = self._text("input")
        share = self._text("max_error_rate")
        return Plan(
            url=self._text("url"),
            stack=Path(self._text("stack")),
            mode=self._choice("mode", Mode),
            rate=self._number("rate", above=0.0, most=MAX_RATE),
            duration=self._number("duration", above=0.0, most=MAX_SECONDS),
            warmup=self._number("warmup", above=-1.0, most=MAX_SECONDS),
            mix=mix,
            keys=self._path("keys"),
            arrivals=self._choice("arrivals", Arrivals),
            filler=" " + text if text else filler_of(self._integer("input_bytes", MIN_INPUT_BYTES, MAX_INPUT_BYTES)),
            model=self._text("model") or None,
            connections=self._integer("connections", 1, MAX_CONNECTIONS),
            timeout=self._number("timeout", above=0.0, most=MAX_SECONDS),
            verify=self._choice("verify", Verify),
            audit_wait=self._number("audit_wait", above=-1.0, most=MAX_SECONDS),
            seed=self._integer("seed", 0, 2**63) if self._text("seed") else secrets.randbits(32),
            slo=self._parsed("slo", lambda value: parse_slo(value, mix.tiers)),
            max_error_rate=self._parsed("max_error_rate", parse_share) if share else None,
            echo=self._choice("echo", Echo),
            report=self._path("report"),
            json=self._path("json"),
        )

    def _text(self, option: str) -> str:
        value = self._given.get(option)
        return OPTIONS[option].default if value is None else value

    def _path(self, option: str) -> Path | None:
        text = self._text(option)
        return Path(text) if text else None

    def _parsed(self, option: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(self._text(option))
        except (MixError, SloError) as error:
            raise UsageError(f"{TOOL.both_names(option)}: {error}.") from None

    def _number(self, option: str, *, above: float, most: float) -> float:
        """A number; `above` of -1 stands for "0 or more"."""
        text = self._text(option)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (above < value <= most and value >= 0):
            least = "above 0" if above == 0 else "of 0 or more"
            raise UsageError(f"{TOOL.both_names(option)}: must be a number {least}, at most {most:g}, got {text!r}.")
        return value

    def _integer(self, option: str, least: int, most: int) -> int:
        text = self._text(option)
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise UsageError(f"{TOOL.both_names(option)}: must be an integer from {least} to {most}, got {text!r}.")
        return int(text)

    def _choice(self, option: str, kind: type[E]) -> E:
        text = self._text(option)
        try:
            return kind(text)
        except ValueError:
            raise UsageError(f"{TOOL.both_names(option)}: must be one of {', '.join(kind)}, got {text!r}.") from None


def read_address(url: str) -> Address:
    """Take a URL apart; its path, if any, goes before `/v1/inference`. Raises UsageError."""
    where = TOOL.both_names("url")
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise UsageError(f"{where}: {url!r} is not a URL: {error}.") from None
    if parts.scheme != "http" or not parts.hostname or not url.isascii() or not url.isprintable():
        raise UsageError(f"{where}: must be http://HOST:PORT (plain TCP, no TLS), got {url!r}.")
    if parts.username or parts.query or parts.fragment:
        raise UsageError(f"{where}: must hold no user, query or fragment.")
    return Address(parts.hostname, port, parts.netloc, parts.path.rstrip("/") + "/v1/inference")
