"""The 200 of `POST /v1/inference`: body, `Server-Timing`, and nothing that is not in the contract."""

import msgspec

from gateway.api.format import Served
from gateway.http.response import Answer, encode_json
from scheduler.protocol.replies import Reply

# RFC 9211: an answer that was kept, or the run of an equal request that was under way.
_CACHE_STATUS = {
    "cache": "Cache-Status: tierlane; hit\r\n",
    "collapsed": "Cache-Status: tierlane; fwd=miss; collapsed\r\n",
}


class Metadata(msgspec.Struct, gc=False):
    """Where the time went, and who did the work. Times in milliseconds."""

    tokens_used: int
    latency_ms: float
    queue_ms: float
    gpu_ms: float
    batch_size: int
    attempts: int
    model_version: str
    tier: str
    cached: bool = False


class Success(msgspec.Struct, gc=False):
    """The body."""

    request_id: str
    output: str
    metadata: Metadata


def success(served: Served) -> Answer:
    """The answer for a completed request."""
    reply, latency_ms = served.replies[0], served.latency_ms
    metadata = Metadata(
        tokens_used=reply.tokens_used,
        latency_ms=round(latency_ms, 2),
        queue_ms=round(max(0.0, reply.queue_ms), 2),
        gpu_ms=round(max(0.0, reply.gpu_ms), 2),
        batch_size=reply.batch_size,
        attempts=reply.attempts,
        model_version=reply.model_version,
        tier=served.tier,
        cached=reply.served_from == "cache",
    )
    return completed(reply, encode_json(Success(reply.id, reply.output, metadata)), latency_ms, served.lines)


def completed(reply: Reply, body: bytes, latency_ms: float, lines: str) -> Answer:
    """A 200 with `body`: it names the request and says where the time went, whatever form its body has."""
    queue_ms, gpu_ms = max(0.0, reply.queue_ms), max(0.0, reply.gpu_ms)
    # What is neither waiting in the tier nor running: the formed batch's way to the GPU and the answer's way back.
    batch_ms = max(0.0, latency_ms - queue_ms - gpu_ms)
    answer = Answer(200, body)
    answer.lines = (
        f"x-request-id: {reply.id}\r\n"
        f"Server-Timing: queue;dur={queue_ms:.1f}, batch;dur={batch_ms:.1f}, gpu;dur={gpu_ms:.1f}\r\n{lines}"
    )
    if reply.served_from:
        answer.lines += _CACHE_STATUS.get(reply.served_from, "")
    return answer
