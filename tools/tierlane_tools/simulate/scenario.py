"""The scenario of a simulation: its fields, their checks, and how a file and options become one.

A scenario is one document. Missing fields come from DEFAULTS or, for recorded requests, from the catalog: mappings are
merged field by field, and null removes an entry. `--set tiers.free.limits.requests_per_second=50` changes one field. A fault
names the field, what is wrong and what is accepted.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ledger.catalog.snapshot import Model, Tier
from ratelimit.limits import LIMIT_COLUMNS, values
from tierlane.connect import UsageError

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
NotNegativeCount = Annotated[int, Meta(ge=0)]
Limits = dict[str, float | None]

MAX_REQUESTS = 20_000_000
"""About 15 minutes of one core, at 20,000 to 30,000 requests/s."""
SMALLER = "simulate a part: divide gpus, cells.count, and the rate or count of each class by the same factor"
REMOVED = ("mode", "step_s")
"""Fields of the aggregated mode, which was removed."""

DEFAULTS: Mapping[str, Any] = {
    "tiers": {
        "enterprise": {
            "priority": 1,
            "guaranteed_share": 0.05,
            "max_queue_depth": 20_000,
            "limits": {"requests_per_second": 5000, "burst": 5000, "max_concurrency": 2000},
        },
        "paid": {
            "priority": 2,
            "guaranteed_share": 0.25,
            "max_queue_depth": 10_000,
            "shed_depth": 500,
            "shed_wait_ms": 1500,
            "limits": {"requests_per_second": 1000, "burst": 1000, "max_concurrency": 500},
        },
        "free": {
            "priority": 3,
            "guaranteed_share": 0.1,
            "max_queue_depth": 5000,
            "shed_depth": 100,
            "shed_wait_ms": 1000,
            "limits": {"requests_per_second": 200, "burst": 200, "max_concurrency": 100},
        },
    }
}
"""The tiers of a new installation."""


class ScenarioError(UsageError):
    """A scenario that cannot be used; the message is one sentence with the field and what to do."""


class _Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A part of a scenario."""


class TierSection(_Section, frozen=True, kw_only=True):
    """A tier, with columns of the table `tiers`. `limits`: of each of its customers."""

    priority: Count
    limits: Limits
    guaranteed_share: Share = 0.0
    max_queue_depth: Count = 5000
    max_queue_ms: Count = 2000
    shed_depth: Count | None = None
    shed_wait_ms: Count | None = None
    shadow: bool = False
    paused: bool = False


class CustomerClass(_Section, frozen=True, kw_only=True):
    """Equal customers. `rate`: requests/s of each of them, constant or steps [[from second, rate], ...].

    `users` of each of them, or such steps: a user sends the next request when the last one was answered, or after the Retry-After
    of a rejection.
    `words`: the mean length of a request; `words_spread`: the standard deviation of its logarithm. `limits`: own limits, else
    those of the tier. `cells`: the cells of these customers, instead of their homes. `retries`: how often a rejected request is
    sent again after its Retry-After.
    """

    tier: str
    count: Count = 1
    rate: NotNegative | list[tuple[NotNegative, NotNegative]] = 0.0
    users: NotNegativeCount | list[tuple[NotNegative, NotNegativeCount]] = 0
    words: Positive = 10.0
    words_spread: NotNegative = 0.0
    weight: Positive = 1.0
    limits: Limits = {}
    quotas: dict[str, int] = {}
    cells: list[str] = []
    retries: Annotated[int, Meta(ge=0, le=100)] = 0

    @property
    def steps(self) -> Sequence[tuple[float, float]]:
        """(from second, requests/s of each customer), in order of time."""
        return [(0.0, self.rate)] if isinstance(self.rate, int | float) else sorted(self.rate)

    @property
    def user_steps(self) -> Sequence[tuple[float, int]]:
        """(from second, users of each customer), in order of time."""
        return [(0.0, self.users)] if isinstance(self.users, int) else sorted(self.users)


class ModelSection(_Section, frozen=True, kw_only=True):
    """The model, with columns of the table `models`. `total_ms`: as TIERLANE_TOTAL_REQUEST_MS."""

    max_batch_size: Count = 32
    max_wait_ms: NotNegative = 40.0
    target_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.8
    rps_per_gpu: Positive = 100.0
    total_ms: Count = 4000


class Costs(_Section, frozen=True, kw_only=True):
    """Measured costs in ms. A batch takes `batch_ms` + its requests x `request_ms` + its words x `word_ms` on the GPU.

    `sizes`: {size: ms} instead of the first two, with straight lines between. `spread`: the standard deviation of the logarithm.
    `dispatch_ms`: from the decision to form a batch until it runs. `call_ms`: what a response takes beyond queue and GPU.
    With `slots`, each GPU runs so many requests at a time, instead of batches: each word of a request takes a step of `step_ms` +
    running requests x `step_item_ms`. `learn_slots`: the worker does not know that number, and learns it from the engine's metrics,
    as before an endpoint; what it sends beyond it waits in the engine.
    """

    batch_ms: NotNegative = 50.0
    request_ms: NotNegative = 0.0
    word_ms: NotNegative = 0.0
    sizes: dict[int, float] = {}
    spread: NotNegative = 0.0
    dispatch_ms: NotNegative = 1.0
    call_ms: NotNegative = 2.5
    slots: NotNegativeCount = 0
    learn_slots: bool = False
    step_ms: Positive = 12.0
    step_item_ms: NotNegative = 0.15

    def run_ms(self, size: float, words: float) -> float:
        """The time of a batch on the GPU, without spread."""
        words_ms, points = words * self.word_ms, sorted(self.sizes.items())
        if not points:
            return self.batch_ms + size * self.request_ms + words_ms
        if len(points) == 1:
            return points[0][1] + words_ms
        after = next((n for n in range(1, len(points) - 1) if size <= points[n][0]), len(points) - 1)
        (low, low_ms), (high, high_ms) = points[after - 1], points[after]
        return max(0.0, low_ms + (high_ms - low_ms) * (size - low) / (high - low)) + words_ms


class SchedulerSection(_Section, frozen=True, kw_only=True):
    """Settings of schedulers, as TIERLANE_BATCH_LOOKAHEAD_WORKERS, TIERLANE_AGEING_MS and TIERLANE_BATCH_HEADROOM."""

    batch_lookahead_workers: Count = 4
    ageing_ms: Count = 1000
    batch_headroom: Annotated[float, Meta(ge=0, le=0.5)] = 0.05


class ScenarioChange(_Section, frozen=True, kw_only=True):
    """A change at a time: the number of GPUs, their speed, or the state of a cell. A lost cell stops for `outage_s`; see docs.

    `slower`: all GPUs take so many times as long as at the start. `killed`: so many more engines end; their workers stay, unhealthy.
    """

    at_s: NotNegative
    gpus: NotNegativeCount | None = None
    slower: Positive | None = None
    killed: Count | None = None
    cell: str | None = None
    state: Literal["open", "draining", "lost"] | None = None


class CellSection(_Section, frozen=True, kw_only=True):
    """Cells. `move_ms`: the time in which a worker changes its cell. `digest_ms`: between the digests of a cell; half of it
    while workers should move. `outage_s`: the time from the loss of a cell until its customers are served in direct mode.
    """

    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    weights: dict[str, Positive] = {}
    move_ms: NotNegative = 20.0
    digest_ms: Positive = 250.0
    outage_s: NotNegative = 1.0

    @property
    def names(self) -> list[str]:
        """cell-1, cell-2 ..."""
        return [f"cell-{number}" for number in range(1, self.count + 1)]


class SimulationScenario(_Section, frozen=True, kw_only=True):
    """All fields. `arrivals`: a file with recorded requests (docs/simulate.md) beside those of `customers`."""

    tiers: dict[str, TierSection]
    customers: dict[str, CustomerClass] = {}
    gpus: Count = 2
    duration_s: Positive = 60.0
    warmup_s: NotNegative = 5.0
    seed: int = 1
    arrivals: str = ""
    model: ModelSection = ModelSection()
    costs: Costs = Costs()
    scheduler: SchedulerSection = SchedulerSection()
    cells: CellSection = CellSection()
    changes: list[ScenarioChange] = []

    @property
    def ends_s(self) -> float:
        """When the last request arrives."""
        return self.warmup_s + self.duration_s

    def offered(self) -> float:
        """How many requests the customers of the classes send, on average."""
        total = 0.0
        for each in self.customers.values():
            steps = [*each.steps, (math.inf, 0.0)]
            for (from_s, rate), (until_s, _) in pairwise(steps):
                total += each.count * rate * max(0.0, min(until_s, self.ends_s) - min(from_s, self.ends_s))
        return total

    def tier_rows(self) -> tuple[Tier, ...]:
        """The tiers as the catalog has them, by priority."""
        rows = [
            Tier(
                name,
                tier.priority,
                tier.guaranteed_share,
                values(**tier.limits),
                tier.max_queue_depth,
                tier.max_queue_ms,
                tier.shed_depth,
                tier.shed_wait_ms,
                tier.shadow,
                tier.paused,
            )
            for name, tier in self.tiers.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.priority))

    def model_row(self) -> Model:
        """The model as the catalog has it."""
        model = self.model
        return Model(
            "model",
            "default",
            model.max_batch_size,
            None,
            round(model.max_wait_ms),
            model.rps_per_gpu,
            model.target_utilization,
            0,
            enabled=True,
        )


def read_document(path: Path) -> dict[str, Any]:
    """The document of a scenario file. Raises ScenarioError."""
    try:
        document = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}; name a scenario file in YAML.") from error
    except msgspec.DecodeError as error:
        reason = " ".join(str(error).split())
        raise ScenarioError(f"{path} is not valid YAML: {reason}.") from error
    if not isinstance(document, dict):
        raise ScenarioError(f"{path} must be a mapping with fields such as customers and gpus; see docs/simulate.md.")
    return document


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`: mappings field by field; null removes."""
    result = dict(base)
    for name, value in changes.items():
        if value is None and isinstance(result.get(name), Mapping):
            del result[name]
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def with_settings(document: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The document with fields from `path=value` texts; a value is YAML. Raises ScenarioError."""
    result = dict(document)
    for text in settings:
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")):
            raise ScenarioError(f"--set: must be FIELD=VALUE, such as model.max_batch_size=16, got {text!r}.")
        try:
            change: Any = msgspec.yaml.decode(value.encode())
        except msgspec.DecodeError:
            raise ScenarioError(f"--set {path}: the value must be YAML, got {value!r}.") from None
        for name in reversed(path.split(".")):
            change = {name: change}
        result = merged(result, change)
    return result


def scenario_from(document: Mapping[str, Any]) -> SimulationScenario:
    """Check a document. Raises ScenarioError."""
    for name in REMOVED:
        if name in document:
            raise ScenarioError(
                f"{name}: the aggregated mode was removed; remove this field. If the system is large, {SMALLER}."
            )
    try:
        scenario = msgspec.convert(document, SimulationScenario, strict=False)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        field = place.strip("`.").replace("[...]", ".*") or "the scenario"
        raise ScenarioError(f"{field}: {message[:1].lower()}{message[1:]}; see docs/simulate.md.") from None
    if not scenario.tiers:
        raise ScenarioError("tiers: there is none; add at least one.")
    for name, tier in scenario.tiers.items():
        _check_limits(f"tiers.{name}", tier.limits)
        for column in LIMIT_COLUMNS:
            if column.required and tier.limits.get(column.name) is None:
                raise ScenarioError(f"tiers.{name}.limits.{column.name}: is missing; every tier needs it.")
    priorities = [tier.priority for tier in scenario.tiers.values()]
    if len(set(priorities)) < len(priorities):
        raise ScenarioError("tiers: two tiers have the same priority; give each another one, 1 is served first.")
    if sum(tier.guaranteed_share for tier in scenario.tiers.values()) > 1 + 1e-9:
        raise ScenarioError("tiers: the guaranteed shares sum to more than 1; reduce guaranteed_share of a tier.")
    if not scenario.customers and not scenario.arrivals:
        raise ScenarioError("customers: there is no class; add one with tier and rate, or name a file in arrivals.")
    for name, each in scenario.customers.items():
        if each.tier not in scenario.tiers:
            known = ", ".join(scenario.tiers)
            raise ScenarioError(f"customers.{name}.tier: there is no tier {each.tier!r}; use one of {known}.")
        _check_limits(f"customers.{name}", each.limits)
    _check_cells(scenario)
    return scenario


def _check_limits(place: str, limits: Limits) -> None:
    names = [column.name for column in LIMIT_COLUMNS]
    for name, value in limits.items():
        if name not in names:
            raise ScenarioError(f"{place}.limits.{name}: is no limit; use {', '.join(names)}.")
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ScenarioError(f"{place}.limits.{name}: must be above 0, or null, got {value}.")


def _check_cells(scenario: SimulationScenario) -> None:
    known = set(scenario.cells.names)
    named = [(f"customers.{name}.cells", cell) for name, each in scenario.customers.items() for cell in each.cells]
    named += [("cells.weights", cell) for cell in scenario.cells.weights]
    for number, change in enumerate(scenario.changes):
        of_gpus = (change.gpus, change.slower, change.killed)
        if of_gpus == (None, None, None) and (change.cell is None or change.state is None):
            raise ScenarioError(f"changes[{number}]: changes nothing; give gpus, slower, killed, or cell and state.")
        if change.killed and not scenario.costs.slots:
            raise ScenarioError(
                f"changes[{number}].killed: only engines with slots are killed; set costs.slots, or change gpus."
            )
        named += [(f"changes[{number}].cell", change.cell)] if change.cell else []
    for place, cell in named:
        if cell not in known:
            last = scenario.cells.names[-1]
            raise ScenarioError(f"{place}: there is no cell {cell!r}; cells.count makes cell-1 to {last}.")
