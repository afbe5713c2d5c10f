"""From claimed requests to what the model process gets, and from what it answers to outcomes. Pure.

A request is never started when the time it has left is under what a run needs, nor one whose body is gone; both get their
outcome without the model. Bodies are passed on as they are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_pool.backends.backend import ItemResult
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import ClaimedRequest, Outcome


@dataclass(frozen=True)
class Plan:
    """What of a batch runs, and what ends without running. `longest_ms` is the most time that any member has left.

    `left_ms`: the time that each has left that runs.
    """

    ids: list[str]
    bodies: list[bytes]
    early: list[Outcome]
    longest_ms: float
    left_ms: list[int]


def make_plan(requests: Sequence[ClaimedRequest], needed_ms: float, gone_ms: float) -> Plan:
    """`needed_ms`: what a run takes; `gone_ms`: how long ago the requests' time left was read."""
    least_ms = needed_ms + gone_ms
    early = [_unfit(request, least_ms) for request in requests if request.ms_left <= least_ms or not request.body]
    fit = [request for request in requests if request.ms_left > least_ms and request.body] if early else requests
    longest_ms = max((request.ms_left for request in requests), default=0) - gone_ms
    return Plan(
        [request.id for request in fit],
        [request.body for request in fit],
        early,
        longest_ms,
        [int(request.ms_left - gone_ms) for request in fit],
    )


def completed(plan: Plan, results: Sequence[ItemResult], gpu_ms: float, version: str) -> list[Outcome]:
    """The outcomes of the whole batch; `results` are those of the plan's bodies, in order."""
    ran = [
        Outcome(request_id, r.error_code, gpu_ms, r.tokens_used, version, r.output, r.output_tokens, r.finish_reason)
        for request_id, r in zip(plan.ids, results, strict=True)
    ]
    return plan.early + ran if plan.early else ran


def refused(plan: Plan, code: ErrorCode, sentence: str) -> list[Outcome]:
    """The outcomes of a batch that the model cannot be given."""
    return plan.early + [not_run(request_id, code, sentence) for request_id in plan.ids]


def _unfit(request: ClaimedRequest, least_ms: float) -> Outcome:
    if request.ms_left <= least_ms:
        late = "Too little time was left to run this request."
        return not_run(request.id, ErrorCode.DEADLINE_EXCEEDED, late)
    return not_run(request.id, ErrorCode.INVALID_REQUEST, "The stored request cannot be read.")


def not_run(request_id: str, code: ErrorCode, sentence: str) -> Outcome:
    return Outcome(request_id, code, -1.0, 0, "", sentence)
