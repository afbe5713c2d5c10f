"""What the parts of the chaos run hand each other: whom to send to, what was done to the stack, where proof lies.

All times are seconds of CLOCK_MONOTONIC on this machine (`time.monotonic`), which its processes share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True)
class Customer:
    """One customer of the load. `id` is the UUID in `customers.id`, as text."""

    tier: str
    id: str
    name: str
    key: str


@dataclass(frozen=True)
class Target:
    """Where the load goes: `http_urls`, one per gateway, and all customers; each request draws one of either."""

    http_urls: tuple[str, ...]
    customers: tuple[Customer, ...]


class What(StrEnum):
    """What a fault event tells."""

    START = "start"
    HEAL = "heal"


@dataclass(frozen=True)
class FaultEvent:
    """A fault began or was healed at `at`; `error` says why it could not be (it is then no fault)."""

    at: float
    name: str
    target: str
    what: What
    details: str = ""
    error: str = ""


@dataclass(frozen=True)
class Sources:
    """Where evidence is read after the drain, past all proxies.

    `database_url` and `redis_url` as in the settings (asyncpg driver). `runs` is the directory into which the backend
    `tierlane.chaos.echo` writes one JSON line for each item when it begins to run it, {"nonce", "sent", "began",
    "takes"} (`sent` is the client's time out of the input, null where there is none; `takes` in seconds), in a file
    `*.jsonl` for each process, whose last line may be cut; None where the stack's backend writes none, and late execution cannot be measured. `started_at` is wall-clock seconds (UNIX time)
    before the first request. `gateway_urls` and `service_token` are for `/internal/*`.
    """

    database_url: str
    redis_url: str
    runs: Path | None
    started_at: float
    gateway_urls: tuple[str, ...] = ()
    service_token: str = ""


@dataclass(frozen=True)
class Recovery:
    """How long after its heal the load was whole again; None: not until the load ended."""

    event: FaultEvent
    seconds: float | None


@dataclass(frozen=True)
class RunInfo:
    """What the report says of the run itself. `schedule` is in plain text, one line for each planned fault.

    `took_s`: seconds of each part of the run, by name.
    """

    seed: int
    duration_s: float
    rate: float
    versions: dict[str, str]
    shape: str
    schedule: Sequence[str] = ()
    events: Sequence[FaultEvent] = ()
    recoveries: Sequence[Recovery] = ()
    drained_s: float | None = None
    interrupted: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    took_s: Mapping[str, float] = field(default_factory=dict)


# The contract of an input: "<nonce>:<time.monotonic() at sending, 6 decimals>:<padding>". The nonce is a secret of the
# request, so the reversed output ends with it reversed; the time tells the backend's log how late a run began.
def request_input(nonce: str, sent: float, padding: str) -> str:
    """The input of one request."""
    return f"{nonce}:{sent:.6f}:{padding}"
