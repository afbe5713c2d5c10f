"""What the handler of `POST /v1/inference` works with; built once by the composition root."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.audit_pairs import Pair
from gateway.auth.authenticator import Doorman
from gateway.body_budget import BodyBudget
from gateway.cancels import Cancels
from gateway.catalog import CatalogView, IdentityView
from gateway.config import GatewayConfig
from gateway.direct.mode import Direct
from gateway.doors import Doors
from gateway.http.errors import Faults
from gateway.inference.admission import Admitter
from gateway.inference.pending import Waiters
from gateway.inference.traces import RequestTraces
from gateway.limits.capacity import LiveLimits
from gateway.limits.demand import Meter
from gateway.metrics.counters import Tally
from gateway.replays import FetchResults
from gateway.request_log import RequestLog
from scheduler.errors import RequestError
from scheduler.protocol.admission import Verdict

NoteRefusal = Callable[[str, IdentityView, RequestError, Verdict | None, float], None]
"""Told of every request that was not let in: its id, whose it is, the error, what admission said, the tier's factor."""


def _tell_nobody(*_: object) -> None:
    """Nobody asked to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
    """The parts by name."""

    config: GatewayConfig
    catalog: CatalogView
    limits: LiveLimits
    waiters: Waiters
    admitter: Admitter
    cancels: Cancels
    meter: Meter
    faults: Faults
    doors: Doors
    bodies: BodyBudget
    results: FetchResults
    direct: Direct
    doorman: Doorman | None = None  # None: API keys only, and nobody is told to wait.
    note_refusal: NoteRefusal = _tell_nobody
    remember: Callable[[Iterable[Pair]], None] = _tell_nobody  # Takes ends to tell Redis again, should it lose them.
    greedy: Callable[[], bool] = bool  # Whether no worker samples where a request has no temperature.
    model_version: Callable[[], str] = str  # The one that all healthy workers run; "" where that is not known.
    tally: Tally = field(default_factory=Tally)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    clock: Callable[[], float] = time.monotonic
