"""The measurements in the heartbeat of a worker."""

import time

from msgspec.structs import replace

from gpu_pool.worker.execution import Execution
from scheduler.protocol.pool_view import WorkerReport


def with_measurements(report: WorkerReport, execution: Execution) -> WorkerReport:
    """The report with what was measured of the worker's model, with slots or with batches."""
    slots = execution.slots
    if slots.count:
        now, usage = time.monotonic(), slots.usage
        mean_ms = usage.mean_ms(now)
        return replace(
            report,
            rps=1000 * slots.count / mean_ms if mean_ms else 0.0,
            service_p95_ms=slots.service.typical_p95_ms(1),
            base_ms=round(mean_ms, 3),
            seen_batch=round(usage.mean_running(now), 2),
            padding_waste=round(slots.padding_waste, 3),
            width=slots.count,
            fresh_batch=round(usage.recent_running(now), 2),
            served_rps=round(usage.served_rps(), 3),
            slots=slots.count,
            slots_source=slots.source,
            free_slots=-1 if slots.is_claiming else max(0, slots.free),
        )
    item_ms, base_ms = execution.service.fit()
    return replace(
        report,
        rps=execution.rate_rps,
        service_p95_ms=execution.service_p95_ms,
        base_ms=round(base_ms, 3),
        item_ms=round(item_ms, 4),
        seen_batch=round(execution.service.seen_batch, 1),
        padding_waste=round(execution.padding_waste, 3),
        fresh_batch=round(execution.service.fresh_batch, 1),
        served_rps=round(execution.served.rps, 2),
    )
