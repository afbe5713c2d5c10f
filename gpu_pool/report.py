"""What a worker reports in each heartbeat."""

import time
from typing import NamedTuple

from gpu_pool.config import WorkerConfig
from gpu_pool.worker.execution import Execution
from scheduler.protocol.pool_view import GpuReading, WorkerReport


class WorkerReading(NamedTuple):
    """The state of a worker now. `share` (0..1) is the busy share of its model, `address` that of its direct endpoint.

    `model_ms`: see `SlowModel`; `context_tokens`: see `WorkerReport`.
    """

    status: str
    share: float
    in_flight: int
    version: str
    address: str
    gpu: GpuReading | None
    model_pid: int
    model_ms: float
    context_tokens: int
    reason: str


def report_of(config: WorkerConfig, execution: Execution, reading: WorkerReading) -> WorkerReport:
    """The content of a heartbeat."""
    if execution.slots.count:
        return _report_of_slots(config, execution, reading)
    item_ms, base_ms = execution.service.fit()
    return WorkerReport(
        id=config.worker_id,
        status=reading.status,
        utilization=reading.share,
        in_flight=reading.in_flight,
        rps=execution.rate_rps,
        service_p95_ms=execution.service_p95_ms,
        backend=config.backend,
        model_version=reading.version,
        direct=reading.address,
        base_ms=round(base_ms, 3),
        item_ms=round(item_ms, 4),
        seen_batch=round(execution.service.seen_batch, 1),
        gpu=reading.gpu,
        padding_waste=round(execution.padding_waste, 3),
        model_pid=reading.model_pid,
        fresh_batch=round(execution.service.fresh_batch, 1),
        served_rps=round(execution.served.rps, 2),
        model_ms=round(reading.model_ms, 1),
        timeout_ms=config.gpu_timeout_ms,
        context_tokens=reading.context_tokens,
        reason=reading.reason,
    )


def _report_of_slots(config: WorkerConfig, execution: Execution, reading: WorkerReading) -> WorkerReport:
    slots, usage, now = execution.slots, execution.slots.usage, time.monotonic()
    mean_ms = usage.mean_ms(now)
    return WorkerReport(
        id=config.worker_id,
        status=reading.status,
        utilization=reading.share,
        in_flight=reading.in_flight,
        rps=1000 * slots.count / mean_ms if mean_ms else 0.0,
        service_p95_ms=slots.service.typical_p95_ms(1),
        backend=config.backend,
        model_version=reading.version,
        direct=reading.address,
        base_ms=round(mean_ms, 3),
        seen_batch=round(usage.mean_running(now), 2),
        gpu=reading.gpu,
        padding_waste=round(slots.padding_waste, 3),
        model_pid=reading.model_pid,
        width=slots.count,
        fresh_batch=round(usage.recent_running(now), 2),
        served_rps=round(usage.served_rps(), 3),
        model_ms=round(reading.model_ms, 1),
        timeout_ms=config.gpu_timeout_ms,
        slots=slots.count,
        slots_source=slots.source,
        free_slots=-1 if slots.is_claiming else max(0, slots.free),
        context_tokens=reading.context_tokens,
        reason=reading.reason,
    )
