"""Recorded requests as the arrivals of a simulation: from the audit, or from a CSV file.

The audit has accepted requests only. So a simulation of it shows what other limits, tiers or GPUs would have done to these
requests; requests that were rejected have to be added, as classes of customers or by a file, which may have every request
that arrived. From the audit come also the catalog (tiers, limits, the model), the number of GPUs, and the costs: the time of a batch
by its size as a worker fits it (`gpu_pool/worker/service_time.py`), and the least overhead of a call.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_pool.worker.service_time import ServiceTime
from ledger.audit.queries import RecordedRequest, recorded_requests, with_statement_timeout
from ledger.catalog.loader import load
from ledger.catalog.snapshot import Customer, Model, Snapshot, Tier
from ratelimit.limits import LIMIT_COLUMNS, Values
from ratelimit.request_limits import FUNCTION
from scheduler.token_estimates import estimate
from tierlane.connect import database
from tierlane_tools.simulate.events import Arrival
from tierlane_tools.simulate.results import Document, LatencyCounts
from tierlane_tools.simulate.scenario import ScenarioError, SimulationScenario

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

TIMEOUT_MS = 600_000
MOST_ROWS = 5_000_000
LEAST_OVERHEAD = 0.1
"""The share of the requests with the least overhead, whose largest one is taken: others waited for a worker."""

_DAY = re.compile(r"\d{4}-\d\d-\d\d")

FIELDS = ("at_s", "customer", "words")


@dataclass
class RecordedTraffic:
    """Recorded requests. `customers`: the name of the customer of each number in `arrivals`; `base`: fields of the scenario."""

    arrivals: list[Arrival] = field(default_factory=list)
    customers: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    shown: Document = field(default_factory=dict)
    """The recorded figures by tier, to compare with."""

    notes: dict[str, str] = field(default_factory=dict)


def time_range(first: str, last: str) -> tuple[datetime, datetime]:
    """The times of `--from` and `--to`, in UTC; a day as `--to` includes this day. Raises ScenarioError."""
    begin, end = _time("--from", first), _time("--to", last)
    if _DAY.fullmatch(last):
        end += timedelta(days=1)
    if end <= begin:
        raise ScenarioError(f"--to: must be after --from ({begin:%Y-%m-%d %H:%M}), got {last}.")
    return begin, end


def _time(option: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        example = "2026-11-20 or 2026-11-20T10:00"
        raise ScenarioError(f"{option}: must be a day or a time in UTC, such as {example}, got {text!r}.") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


async def from_audit(settings: "Settings", begin: datetime, end: datetime) -> RecordedTraffic:
    """The requests of one pool, and the catalog as it is now. Raises ScenarioError, and what `database` raises."""
    async with database(settings, "tierlane-simulate") as connection:
        snapshot = await load(connection)
        models = {name: model for name, model in snapshot.models.items() if model.pool == settings.pool}
        if not models:
            raise ScenarioError(f"--pool: no model names the pool {settings.pool!r}; see `tierlane model list`.")
        rows = AuditRows(snapshot, begin)
        async with with_statement_timeout(connection, TIMEOUT_MS):
            async for row in recorded_requests(connection, begin, end, list(models)):
                rows.add(row)
    return rows.recording(models, (end - begin).total_seconds())


class AuditRows:
    """Reads rows of the audit one by one."""

    def __init__(self, snapshot: Snapshot, begin: datetime) -> None:
        self._snapshot = snapshot
        self._begin = begin
        self._numbers: dict[str, int] = {}
        self._found = RecordedTraffic()
        self._service = ServiceTime()
        self._batches: set[str] = set()
        self._workers: dict[int, set[str]] = {}
        self._overheads: list[float] = []
        self._latency: dict[str, LatencyCounts] = {}
        self._counts: dict[str, Counter[str]] = {}
        self._skipped = 0

    def add(self, row: RecordedRequest) -> None:
        """Take a row. Raises ScenarioError if there are too many."""
        customer = self._snapshot.customers.get(row.customer_id or "")
        if customer is None:
            self._skipped += 1
            return
        if len(self._found.arrivals) >= MOST_ROWS:
            raise ScenarioError(f"--to: there are more than {MOST_ROWS:,} requests; choose a shorter time.")
        number = self._numbers.get(customer.id)
        if number is None:
            number = self._numbers[customer.id] = len(self._numbers)
            self._found.customers.append(customer.name)
        words = row.tokens_used or max(1, estimate(row.input_bytes or 0))
        at_s = (row.created_at - self._begin).total_seconds()
        self._found.arrivals.append(Arrival(at_s, number, float(words)))
        if row.worker_id:
            self._workers.setdefault(int(at_s // 60), set()).add(row.worker_id)
        if row.gpu_ms is not None and row.batch_size and row.batch_id:
            if row.batch_id not in self._batches:
                self._batches.add(row.batch_id)
                self._service.record(row.batch_size, row.gpu_ms)
            if row.latency_ms is not None and row.queue_ms is not None:
                self._overheads.append(max(0.0, row.latency_ms - row.queue_ms - row.gpu_ms))
        counts = self._counts.setdefault(customer.tier, Counter())
        counts[row.error_code or row.status] += 1
        if row.status == "completed" and row.latency_ms:
            self._latency.setdefault(customer.tier, LatencyCounts()).add(row.latency_ms)

    def recording(self, models: Mapping[str, Model], seconds: float) -> RecordedTraffic:
        """All of it. Raises ScenarioError without a row."""
        found = self._found
        if not found.arrivals:
            raise ScenarioError(
                "--from: the audit has no request of a known customer in this time; choose another one."
            )
        request_ms, batch_ms = self._service.fit()
        self._overheads.sort()
        overhead_ms = self._overheads[int(LEAST_OVERHEAD * len(self._overheads))] if self._overheads else 0.0
        gpus = max(map(len, self._workers.values()), default=1)
        by_id = self._snapshot.customers
        # The pool's GPUs run all its models, so the lowest row applies, as in the gateway.
        rows = [model for model in models.values() if model.enabled] or list(models.values())
        found.base = {
            "tiers": {tier.name: _tier_fields(tier) for tier in self._snapshot.tiers},
            "customers": {by_id[id_].name: self._customer_fields(by_id[id_]) for id_ in self._numbers},
            "gpus": gpus,
            "duration_s": seconds,
            "warmup_s": 0.0,
            "model": {
                "max_batch_size": min(model.max_batch_size for model in rows),
                "max_wait_ms": min(model.max_wait_ms for model in rows),
                "target_utilization": min(model.target_utilization for model in rows),
                "rps_per_gpu": min(model.rps_per_gpu for model in rows),
            },
            "costs": {"dispatch_ms": overhead_ms / 2, "call_ms": overhead_ms / 2},
        }
        if batch_ms + request_ms > 0:
            found.base["costs"] |= {"batch_ms": round(batch_ms, 3), "request_ms": round(request_ms, 4)}
        for tier, counted in self._counts.items():
            p50, p95, p99 = self._latency.get(tier, LatencyCounts()).percentiles()
            others = {code: count for code, count in counted.items() if code != "completed"}
            times = {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99}
            found.shown[tier] = {"completed": counted["completed"], "others": others, **times}
        found.notes = {
            "recorded": f"{len(found.arrivals):,} requests of {len(self._numbers):,} customers",
            "measured costs": f"{batch_ms:.1f} ms per batch, {request_ms:.2f} ms per request, {overhead_ms:.1f} ms overhead; {gpus} GPUs",
        }
        if self._skipped:
            found.notes["skipped"] = f"{self._skipped:,} requests of deleted customers"
        return found

    def _customer_fields(self, customer: Customer) -> dict[str, Any]:
        """With its own limits only, so that those of its tier can be changed."""
        of_tier = _limit_fields(self._snapshot.tier(customer.tier).limits)
        own = {name: value for name, value in _limit_fields(customer.limits).items() if value != of_tier[name]}
        return {"tier": customer.tier, "weight": customer.weight, "quotas": dict(customer.quotas), "limits": own}


def _limit_fields(limits: Values) -> dict[str, float | None]:
    return {column.name: value for column, value in zip(LIMIT_COLUMNS, limits, strict=True)}


def _tier_fields(tier: Tier) -> dict[str, Any]:
    return {
        "priority": tier.priority,
        "guaranteed_share": tier.guaranteed_share,
        "limits": _limit_fields(tier.limits),
        "max_queue_depth": tier.max_queue_depth,
        "max_queue_ms": tier.max_queue_ms or FUNCTION.queue_ms,
        "shed_depth": tier.shed_depth,
        "shed_wait_ms": tier.shed_wait_ms,
        "shadow": tier.shadow,
    }


def from_file(path: Path, scenario: SimulationScenario) -> list[Arrival]:
    """The arrivals of a CSV file with the columns at_s, customer and words. Raises ScenarioError."""
    numbers = customer_numbers(scenario)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if not set(FIELDS[:2]) <= set(rows.fieldnames or ()):
                raise ScenarioError(f"arrivals: {path} must begin with a line of the columns {', '.join(FIELDS)}.")
            arrivals = [_arrival(path, rows.line_num, row, numbers) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(f"arrivals: {path} cannot be read ({error}); name a CSV file.") from error
    return sorted(arrivals)


def _arrival(path: Path, line: int, row: Mapping[str, str], numbers: Mapping[str, tuple[int, float]]) -> Arrival:
    known = numbers.get(row["customer"])
    if known is None:
        raise ScenarioError(
            f"arrivals: line {line} of {path} names the customer {row['customer']!r}; add it to customers."
        )
    try:
        at_s, words = float(row["at_s"]), float(row.get("words") or known[1])
    except ValueError:
        at_s = words = math.nan
    if not (at_s >= 0 and words > 0):
        raise ScenarioError(f"arrivals: line {line} of {path} must have numbers in at_s and words.")
    return Arrival(at_s, known[0], words)


def customer_numbers(scenario: SimulationScenario) -> dict[str, tuple[int, float]]:
    """The number of each customer, as in `identities`, and the mean length of its requests."""
    numbers: dict[str, tuple[int, float]] = {}
    for name, each in scenario.customers.items():
        for number in range(each.count):
            numbers[f"{name}-{number + 1}" if each.count > 1 else name] = len(numbers), each.words
    return numbers


def numbered(recording: RecordedTraffic, scenario: SimulationScenario) -> list[Arrival]:
    """The recorded arrivals with the numbers of the scenario's customers; those of removed customers are left out."""
    numbers = customer_numbers(scenario)
    new = [numbers[name][0] if name in numbers else None for name in recording.customers]
    found: list[Arrival] = []
    for arrival in recording.arrivals:
        number = new[arrival.customer]
        if number is not None:
            found.append(Arrival(arrival.at_s, number, arrival.words))
    return found
