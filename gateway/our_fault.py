"""Which endings are held against us: what a service objective counts as failed, here as in deploy/prometheus/rules.yaml."""

from scheduler.errors import ErrorCode

OUR_FAULT = frozenset(
    {
        ErrorCode.SHED_FOR_PRIORITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.REDUCED_CAPACITY,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BACKPRESSURE,
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GPU_TIMEOUT,
        ErrorCode.WORKER_LOST,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.ABANDONED,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.CATALOG_UNAVAILABLE,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.DRAINING,
    }
)
"""Not the client's input, keys, limits or leaving: those are refused or ended as they should be."""
