"""The plan of a run: checked options, the mix of tiers, the schedule, the inputs and the check of their outputs.

A wrong option is reported in one sentence that names it. An open-loop schedule is absolute: a late request does not
move the next one, and latency counts from the due time, so a server that stalls cannot hide it by slowing down its own
load (coordinated omission).

An input is NONCE + filler. The nonce is unique, so that an answer to another request cannot pass for this one, and
begins with letters drawn for each run, so that no cache of an earlier run answers. With a model that reverses, the
output proves that it belongs to the request.
"""

import json
import math
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, cycle, islice
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from tierlane.command import OptionReader
from tierlane_tools.bench.command import MIN_INPUT_BYTES, TOOL
from tierlane_tools.bench.statistics import Objective, SloError, parse_share, parse_slo


class MixError(ValueError):
    """A mix that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Mix:
    """Tiers and their shares, which sum to 1, in the order given."""

    tiers: tuple[str, ...]
    shares: tuple[float, ...]

    def cumulative(self) -> tuple[float, ...]:
        """The upper ends of the tiers' ranges within 0..1, the last one left out."""
        return tuple(accumulate(self.shares))[:-1]


def tier_at(bounds: Sequence[float], point: float) -> int:
    """Which tier a point in 0..1 falls to, given `Mix.cumulative()`."""
    return bisect_right(bounds, point)


def parse_mix(text: str) -> Mix:
    """Read a mix; weights need not sum to 1. Raises MixError, which names the part at fault."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        tier, equals, value = (piece.strip() for piece in part.partition("="))
        if not tier or not equals:
            raise MixError(f"each part must be TIER=WEIGHT, got {part.strip()!r}")
        if tier in weights:
            raise MixError(f"the tier {tier!r} is there twice")
        weights[tier] = _weight(tier, value)
    # A tier of weight nothing is left out, so that nobody needs a key for it.
    kept = {tier: weight for tier, weight in weights.items() if weight}
    total = sum(kept.values())
    if not total:
        raise MixError("at least one tier must have a weight above 0")
    # Rounded, because 0.3 should be told as 0.3.
    return Mix(tuple(kept), tuple(round(weight / total, 12) for weight in kept.values()))


def _weight(tier: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not (weight >= 0 and math.isfinite(weight)):
        raise MixError(f"the weight of {tier!r} must be a number of 0 or more, got {value!r}")
    return weight


class Arrivals(StrEnum):
    """How requests are spread over time."""

    POISSON = "poisson"
    """Independent users: exponential gaps, bursts included."""
    CONSTANT = "constant"
    """A metronome: equal gaps."""


class Due(NamedTuple):
    """One request of the schedule: seconds from the start, and the tier's place in the mix."""

    at_s: float
    tier: int


def schedule(arrivals: Arrivals, rate: float, seconds: float, mix: Mix, seed: int) -> Iterator[Due]:
    """All requests in order of time; the same arguments give the same schedule. `rate` is requests a second."""
    # Two sources, so that another mix leaves the times as they are.
    times = _times(arrivals, rate, seconds, Random(f"{seed}/arrivals"))
    point = Random(f"{seed}/tiers").random
    bounds = mix.cumulative()
    for at_s in times:
        yield Due(at_s, tier_at(bounds, point()))


def _times(arrivals: Arrivals, rate: float, seconds: float, random: Random) -> Iterator[float]:
    if arrivals is Arrivals.CONSTANT:
        # Counted rather than added up, so that rounding does not drift.
        yield from (number / rate for number in range(round(rate * seconds)))
        return
    # As Random.expovariate, without its call for each request.
    log, point = math.log, random.random
    at_s = -log(1.0 - point()) / rate
    while at_s < seconds:
        yield at_s
        at_s -= log(1.0 - point()) / rate


TAG_CHARACTERS = 6
NONCE_CHARACTERS = TAG_CHARACTERS + 8  # The number in hex: 4 billion requests a run.
_FILLER = "the quick brown fox jumps over the lazy dog "


def filler_of(input_bytes: int) -> str:
    """Words that fill an input up to `input_bytes` in all, which must be at least MIN_INPUT_BYTES."""
    return " " + "".join(islice(cycle(_FILLER), input_bytes - MIN_INPUT_BYTES))


def json_text(text: str) -> bytes:
    """The inside of a JSON string, characters beyond ASCII as they are."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


class Inputs:
    """Makes nonces, and knows what an input looks like reversed. `tag`: TAG_CHARACTERS letters or digits."""

    def __init__(self, tag: str, filler: str) -> None:
        self._tag = tag.encode("ascii")
        self.filler = filler
        self._reversed_filler = filler[::-1]
        self.reversed_before = b'"output":"' + json_text(self._reversed_filler)
        """What stands before the reversed nonce and a quote, in compact JSON whose output is an input reversed."""

    def nonce(self, number: int) -> bytes:
        """The first characters of input `number`: always NONCE_CHARACTERS long."""
        return b"%s%08x" % (self._tag, number & 0xFFFFFFFF)

    def reversed_text(self, nonce: bytes) -> str:
        """The input reversed, as text."""
        return self._reversed_filler + nonce[::-1].decode("ascii")


DECIDE_AFTER = 20


class Verify(StrEnum):
    """What is known of the model."""

    AUTO = "auto"
    """Find out from the first answers whether it reverses."""
    REVERSED = "reversed"
    """It returns the input reversed, as the simulated backend does."""
    OFF = "off"
    """Its output proves nothing."""


class _Answer(msgspec.Struct):
    output: str


_decoder = msgspec.json.Decoder(_Answer)


class OutputCheck:
    """Looks at every 200. `mode` becomes REVERSED or OFF once AUTO has decided."""

    __slots__ = ("_before", "_inputs", "_matches", "_misses", "mode")

    def __init__(self, mode: Verify, inputs: Inputs) -> None:
        self.mode = mode
        self._inputs = inputs
        self._before = inputs.reversed_before
        self._matches = 0
        self._misses = 0

    def look(self, nonce: bytes, body: bytes) -> None:
        """Compare one answer's body with the request that was sent."""
        if self.mode is Verify.OFF:
            return
        # The first question settles nearly every answer, so it is asked without a call.
        if self._before + nonce[::-1] + b'"' in body or self._is_reversed(nonce, body):
            self._matches += 1
        else:
            self._misses += 1
        if self.mode is Verify.AUTO and self._matches + self._misses >= DECIDE_AFTER:
            # By majority: a system that crosses some answers must not switch the check off.
            self.mode = Verify.REVERSED if self._matches >= self._misses else Verify.OFF

    @property
    def active(self) -> bool:
        """Whether outputs are compared, as far as is known by now."""
        return self.mode is Verify.REVERSED or (self.mode is Verify.AUTO and self._matches > self._misses)

    @property
    def crossed(self) -> int:
        """Answers whose output is not that of their request; 0 while outputs prove nothing."""
        return self._misses if self.active else 0

    @property
    def verified(self) -> int:
        """Answers whose output was seen to be that of their request."""
        return self._matches if self.active else 0

    def _is_reversed(self, nonce: bytes, body: bytes) -> bool:
        # Another server may escape or space its JSON differently.
        try:
            return _decoder.decode(body).output == self._inputs.reversed_text(nonce)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False


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
