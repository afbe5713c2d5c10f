"""What one look at a pool shows: queues, batches, workers, gateways. Values only; `presence` and `batches` fetch them."""

import msgspec


class TierDepth(msgspec.Struct, array_like=True, frozen=True):
    """A tier queue: how many ids it holds and how long the oldest has waited (ms)."""

    name: str
    depth: int
    oldest_ms: float


class Queues(msgspec.Struct, array_like=True, frozen=True):
    """What waits and what runs. `leased_batches` counts ready and running ones; `healthy_gpus` is -1 where not counted."""

    now_ms: int
    tiers: list[TierDepth]
    ready_batches: int
    leased_batches: int
    healthy_gpus: int

    @property
    def depth(self) -> int:
        """Ids in all tier queues, dead entries included."""
        return sum(tier.depth for tier in self.tiers)


class WorkerBeat(msgspec.Struct, array_like=True, frozen=True):
    """What a worker says of itself. `rps` is its measured rate at a full batch (0: not measured yet)."""

    id: str
    status: str  # starting | ready | busy | draining | down
    utilization: float
    in_flight: int
    rps: float
    service_p95_ms: float
    backend: str
    model_version: str
    direct: str = ""  # host:port of its direct endpoint; "": it has none.


class WorkerView(msgspec.Struct, frozen=True):
    """A worker as others see it: its last beat, how old that is, and whether it counts as healthy."""

    id: str
    status: str
    utilization: float
    in_flight: int
    age_ms: float
    healthy: bool
    rps: float
    service_p95_ms: float
    backend: str
    model_version: str
    direct: str = ""


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """One tier as one gateway sees it: offered and shed requests/s, and p95 of the answer time in ms (0: none)."""

    demand_rps: float
    shed_per_second: float
    p95_ms: float


class GatewayStats(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway says of itself with every beat."""

    gateway_id: str
    requests_per_second: float
    tiers: dict[str, TierStats]


class Observation(msgspec.Struct, frozen=True):
    """One atomic look at a pool."""

    now_ms: int
    tiers: dict[str, TierDepth]
    workers: list[WorkerView]
    gateways: list[GatewayStats]
    ready_batches: int
    leased_batches: int
    outbox: int
    dlq: int

    @property
    def healthy_gpus(self) -> int:
        return sum(worker.healthy for worker in self.workers)

    @property
    def total_gpus(self) -> int:
        return len(self.workers)
