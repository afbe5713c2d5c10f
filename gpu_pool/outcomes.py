"""From claimed requests to what the model gets, and from what it answers to outcomes. Pure.

A request is never started when the time it has left is under what a run needs, and one that cannot be decoded fails
alone; both get their outcome without the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_pool.backend import Item, ItemResult
from scheduler.batches import ClaimedRequest, Outcome
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload


@dataclass(frozen=True)
class Plan:
    """What of a batch runs, and what ends without running. `longest_ms` is the most time that any member has left."""

    ids: list[str]
    items: list[Item]
    early: list[Outcome]
    longest_ms: float


def make_plan(requests: Sequence[ClaimedRequest], needed_ms: float, gone_ms: float) -> Plan:
    """`needed_ms`: what a run takes; `gone_ms`: how long ago the requests' time left was read."""
    ids: list[str] = []
    items: list[Item] = []
    early: list[Outcome] = []
    for request in requests:
        item = _start(request, request.ms_left - gone_ms, needed_ms)
        if isinstance(item, Item):
            ids.append(request.id)
            items.append(item)
        else:
            early.append(item)
    longest_ms = max((request.ms_left for request in requests), default=0) - gone_ms
    return Plan(ids, items, early, longest_ms)


def completed(plan: Plan, results: Sequence[ItemResult], gpu_ms: float, version: str) -> list[Outcome]:
    """The outcomes of the whole batch; `results` are those of the plan's items, in order."""
    ran = [
        Outcome(request_id, result.error_code, gpu_ms, result.tokens_used, version, result.output)
        for request_id, result in zip(plan.ids, results, strict=True)
    ]
    return plan.early + ran


def refused(plan: Plan, code: ErrorCode, sentence: str) -> list[Outcome]:
    """The outcomes of a batch that the model cannot be given."""
    return plan.early + [not_run(request_id, code, sentence) for request_id in plan.ids]


def _start(request: ClaimedRequest, left_ms: float, needed_ms: float) -> Item | Outcome:
    if left_ms <= needed_ms:
        return not_run(request.id, ErrorCode.DEADLINE_EXCEEDED, "Too little time was left to run this request.")
    try:
        payload = decode_payload(request.body)
    except (ValueError, TypeError):  # TypeError: no body is stored any more.
        return not_run(request.id, ErrorCode.INVALID_REQUEST, "The stored request cannot be read.")
    return Item(payload.input, payload.parameters)


def not_run(request_id: str, code: ErrorCode, sentence: str) -> Outcome:
    return Outcome(request_id, code, -1.0, 0, "", sentence)
