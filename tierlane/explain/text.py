"""Explanations as lines of text and as JSON. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from scheduler.redis_client.keys import DEFAULT_CELL
from tierlane.explain.customer import CustomerExplanation, LimitLine, PastRefusal
from tierlane.explain.factor import GatewayPart, TierPart
from tierlane.explain.figures import columns, count, moment, number, percent, rate, span
from tierlane.explain.request import RequestExplanation

NONE = "-"
_LIMITS = ("LIMIT", "BASE", "OF", "NOW", "LEFT")
_TIERS = ("TIER", "PRIORITY", "GUARANTEED", "DEMAND", "GETS", "FACTOR")
_REFUSALS = ("REJECTED (UTC)", "REQUEST", "CODE", "FACTOR", "BY")


def as_json(explanation: CustomerExplanation | RequestExplanation) -> str:
    """The explanation as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode()


def customer_lines(explanation: CustomerExplanation) -> list[str]:
    """A customer as text."""
    name = f"{explanation.customer} ({explanation.customer_id})" if explanation.customer_id else explanation.customer
    lines = [f"{name}, tier {explanation.tier}" if explanation.tier else name]
    if explanation.cells and explanation.cells != [DEFAULT_CELL]:
        lines.append(f"Cell {', '.join(explanation.cells)}; the figures below are those of {explanation.cells[0]}.")
    lines += _block(_gpu_time(explanation))
    lines += _block(explanation.why)
    lines += _block(columns([_LIMITS, *map(_limit, explanation.limits)]) if explanation.limits else [])
    lines += _block(columns([_TIERS, *map(_tier, explanation.tiers)]) if explanation.tiers else [])
    if _differ(explanation.gateways):
        lines += _block(_gateways(explanation.gateways))
    if explanation.refusals is not None:
        lines += _block(_refusals(explanation.refusals))
    return [*lines, *_block(explanation.not_read)]


def _gpu_time(explanation: CustomerExplanation) -> Iterable[str]:
    """The customer's part of the GPU time of its tier, and what of it waits."""
    if explanation.weight is not None:
        share = "not known" if explanation.gpu_share is None else percent(explanation.gpu_share)
        yield f"Weight {number(explanation.weight)}; share of the tier's GPU time in the last minute: {share}."
    for queue in explanation.queues or ():
        if queue.backlog or queue.debt_ms:
            waiting = count(queue.backlog, "request waits", "requests wait")
            yield f"Queue {queue.queue}: {waiting} in its backlog; debt {number(queue.debt_ms)} ms of GPU time."


def request_lines(explanation: RequestExplanation) -> list[str]:
    """A request as text."""
    lines = [explanation.request_id, *_block(explanation.said)]
    events = [
        (event["at"], event["event"], f"after {span(max(0, event['after_ms']))}") for event in explanation.timeline
    ]
    lines += _block(columns(events) if events else [])
    lines += _block(
        columns([(name, _plain(value)) for name, value in explanation.facts.items()]) if explanation.facts else []
    )
    return [*lines, *_block(explanation.not_read)]


def _block(lines: Iterable[str]) -> list[str]:
    """Lines after an empty one, or nothing."""
    block = list(lines)
    return ["", *block] if block else []


def _limit(line: LimitLine) -> Sequence[str]:
    anew = f" (resets in {span(line.anew_in_ms)})" if line.anew_in_ms is not None else ""
    base, now, left = (NONE if value is None else number(value) for value in (line.base, line.effective, line.left))
    return line.limit, "none" if line.base is None else base, line.of, now, left + anew


def _tier(part: TierPart) -> Sequence[str]:
    shadow = " (shadow)" if part.shadow else ""
    guaranteed = f"{rate(part.guaranteed_rps)} ({percent(part.guaranteed_share)})"
    demand, gets = rate(part.demand_rps), rate(part.allocated_rps)
    return part.name + shadow, str(part.priority), guaranteed, demand, gets, percent(part.factor)


def _differ(gateways: Sequence[GatewayPart]) -> bool:
    return len({percent(gateway.factor) for gateway in gateways}) > 1


def _gateways(gateways: Sequence[GatewayPart]) -> list[str]:
    rows = [(g.id, percent(g.factor), rate(g.allocated_rps), rate(g.capacity_rps)) for g in gateways]
    return columns([("GATEWAY", "FACTOR", "TIER GETS", "CAPACITY"), *rows])


def _refusals(refusals: Sequence[PastRefusal]) -> list[str]:
    if not refusals:
        return ["No rejection in the last 10 minutes."]
    rows = [(moment(r.at_ms), r.request_id, r.code, percent(r.factor), r.refused_by + _more(r)) for r in refusals]
    return columns([_REFUSALS, *rows])


def _more(refusal: PastRefusal) -> str:
    return f" (and {refusal.more} more like it)" if refusal.more else ""


def _plain(value: Any) -> str:
    if value is None:
        return NONE
    return number(value) if isinstance(value, float) else str(value)
