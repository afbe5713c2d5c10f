"""The reply of `observe`: the state of a pool at one time."""

from typing import TypeVar

import msgspec

from scheduler.protocol.pool_view import GatewayStats, Observation, Queues, WorkerReport, WorkerView
from scheduler.redis_client.scripts import inner

_beat = msgspec.msgpack.Decoder(WorkerReport)
_stats = msgspec.msgpack.Decoder(GatewayStats)
_observed = msgspec.msgpack.Decoder(
    tuple[
        Queues,
        list[tuple[str, float, bool, bool, msgspec.Raw]],
        list[tuple[float, msgspec.Raw]],
        int,
        int,
        float,
        float,
        list[str],
        int,
    ]
)

_T = TypeVar("_T")


def decode_observation(packed: bytes) -> Observation:
    """Decode the reply of `observe`. A worker with an unreadable heartbeat is not healthy; the others are not affected."""
    queues, workers, gateways, outbox, dlq, passed_ms, worked_ms, notices, epoch_us = _observed.decode(packed)
    reports = [
        (age_ms, stats) for age_ms, stats in ((age_ms, _unpacked(_stats, raw)) for age_ms, raw in gateways) if stats
    ]
    views: list[WorkerView] = []
    for worker_id, age_ms, healthy, pausing, raw in workers:
        report = _unpacked(_beat, raw)
        if report is None:
            report = WorkerReport(worker_id, "unknown", 0.0, 0, 0.0, 0.0, "", "")
            healthy = pausing = False
        fields = msgspec.structs.asdict(report) | {"id": worker_id}
        views.append(WorkerView(**fields, age_ms=age_ms, healthy=healthy, pausing=pausing))
    return Observation(
        now_ms=queues.now_ms,
        tiers=queues.interactive,
        background=queues.background,
        workers=views,
        gateways=[stats for _, stats in reports],
        ready_batches=queues.ready_batches,
        leased_batches=queues.leased_batches,
        outbox=outbox,
        dlq=dlq,
        gateway_ages_ms={stats.gateway_id: age_ms for age_ms, stats in reports},
        scheduler_age_ms=passed_ms if passed_ms >= 0 else None,
        pass_age_ms=worked_ms if worked_ms >= 0 else None,
        notices=notices,
        epoch_us=epoch_us,
    )


def _unpacked(decoder: msgspec.msgpack.Decoder[_T], raw: msgspec.Raw) -> _T | None:
    """Lua packs nested msgpack as a string: remove its header, then decode the content."""
    try:
        return decoder.decode(inner(bytes(raw)))
    except (msgspec.MsgspecError, ValueError):
        return None
