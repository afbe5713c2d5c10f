"""The line of one call: which fields it has by how the call ended, and that what clients write is in none of them."""

from typing import Any

import pytest
import structlog

from gateway.http.errors import RejectionError
from gateway.inference.events import RequestLog
from gateway.inference.pending import PendingRequest
from integration.gateway_fixtures import LiteralCatalog
from metrics_figures import reply
from ratelimit.limits import NO_LIMITS
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

PLANTED = "canary-5d1f"


def identity() -> Any:
    snapshot = LiteralCatalog().snapshot
    assert snapshot is not None
    return next(key.identity for key in snapshot.keys.values() if key.identity.tier == "free")


def pending(verdict: Verdict | None = None) -> PendingRequest:
    submission = Submission(
        id="req_1", tier="free", customer_id="c", api_key_id="k", nonce=PLANTED, model="tiny", input_bytes=11,
        total_ms=4000, queue_ms=2000, limits=NO_LIMITS, idempotency=PLANTED, body=PLANTED.encode(),
    )  # fmt: skip
    made = PendingRequest(submission, 100.0)
    made.verdict = verdict
    return made


def line_of(ending: str) -> dict[str, Any]:
    """The one line that an ending writes."""
    log = RequestLog(lambda: 100.25)
    with structlog.testing.capture_logs() as lines:
        if ending == "completed":
            log.completed("/v1/completions", identity(), pending(), [reply(output=PLANTED), reply(output=PLANTED)], 0.2)
        elif ending == "accepted":
            log.accepted("/v1/inference", "req_1", identity(), pending())
        elif ending == "refused":
            verdict = Verdict(Admission.SHED, depth=120)
            error = RejectionError(ErrorCode.SHED_FOR_PRIORITY, PLANTED, 300)
            log.failed("/v1/inference", "req_1", identity(), pending(verdict), error)
        else:
            error = RequestError(ErrorCode.INVALID_API_KEY, PLANTED, PLANTED)
            log.failed("/v1/inference", "req_1", None, None, error)
    (line,) = lines
    return line


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (
            "completed",
            {"status": 200, "outcome": "completed", "latency_ms": 200.0, "inputs": 2, "tokens_used": 2, "queue_wait_ms": 20.0,
             "infer_ms": 50.0, "batch_size": 4, "batch_id": "b", "gpu": "w", "attempt": 1, "tier": "free", "model": "tiny"},
        ),
        ("accepted", {"status": 202, "outcome": "accepted", "input_bytes": 11}),
        (
            "refused",
            {"status": 503, "outcome": "shed_for_priority", "reason": "shed", "retry_after_ms": 300, "latency_ms": 250.0},
        ),
        ("unknown", {"status": 401, "outcome": "invalid_api_key", "request_id": "req_1"}),
    ],
)  # fmt: skip
def test_a_line_says_how_it_ended(ending: str, expected: dict[str, Any]) -> None:
    """With what is known by then, and nothing that is empty."""
    line = line_of(ending)

    assert {name: line.get(name) for name in expected} == expected
    assert line["event"] == "request"
    assert None not in line.values()
    assert "" not in line.values()
    assert PLANTED not in str(line)
