"""What a worker says of itself with a heartbeat: how it is, and what its model was measured at."""

from typing import NamedTuple

from gpu_pool.config import WorkerConfig
from gpu_pool.worker.execution import Execution
from scheduler.protocol.pool_view import GpuReading, WorkerBeat


class Seen(NamedTuple):
    """How a worker is now. `share` (0..1) is how busy its model is, `address` that of its direct endpoint."""

    status: str
    share: float
    in_flight: int
    version: str
    address: str
    gpu: GpuReading | None
    model_pid: int


def worker_beat(config: WorkerConfig, execution: Execution, seen: Seen) -> WorkerBeat:
    """The whole of what is said."""
    item_ms, base_ms = execution.service.fit()
    return WorkerBeat(
        id=config.worker_id,
        status=seen.status,
        utilization=seen.share,
        in_flight=seen.in_flight,
        rps=execution.rate_rps,
        service_p95_ms=execution.service_p95_ms,
        backend=config.backend,
        model_version=seen.version,
        direct=seen.address,
        base_ms=round(base_ms, 3),
        item_ms=round(item_ms, 4),
        seen_batch=round(execution.service.seen_batch, 1),
        gpu=seen.gpu,
        padding_waste=round(execution.padding_waste, 3),
        model_pid=seen.model_pid,
        width=execution.width,
        fresh_batch=round(execution.service.fresh_batch, 1),
        served_rps=round(execution.served.rps, 2),
    )
