"""Explanations as lines of text and as JSON. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from scheduler.redis_client.keys import DEFAULT_CELL
from tierlane.explain.customer import CustomerExplanation, LimitLine
from tierlane.explain.factor import TierPart
from tierlane.explain.figures import columns, count, moment, number, percent, rate, span
from tierlane.explain.request import RequestExplanation

NONE, UNKNOWN = "-", "unknown"
_LIMITS = ("LIMIT", "BASE", "OF", "NOW", "LEFT")
_TIERS = ("TIER", "PRIORITY", "GUARANTEED", "DEMAND", "GETS", "FACTOR")
_GATEWAYS = ("GATEWAY", "FACTOR", "TIER GETS", "CAPACITY")
_REFUSALS = ("REJECTED (UTC)", "REQUEST", "CODE", "FACTOR", "BY")
_FAILED = ("CREATED (UTC)", "FAILED REQUEST", "CODE")


def as_json(explanation: CustomerExplanation | RequestExplanation) -> str:
    """The explanation as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode()


def customer_lines(explanation: CustomerExplanation) -> list[str]:
    """A customer as text."""
    name = f"{explanation.customer} ({explanation.customer_id})" if explanation.customer_id else explanation.customer
    lines = [f"{name}, tier {explanation.tier}" if explanation.tier else name]
    if explanation.cells and explanation.cells != [DEFAULT_CELL]:
        lines.append(f"Cell {', '.join(explanation.cells)}; the figures below are those of {explanation.cells[0]}.")
    gpu_time = []
    if explanation.weight is not None:
        share = "not known" if explanation.gpu_share is None else percent(explanation.gpu_share)
        weight = number(explanation.weight)
        gpu_time.append(f"Weight {weight}; share of the tier's GPU time in the last minute: {share}.")
    for queue in explanation.queues or ():
        if queue.backlog or queue.debt_ms:
            backlog = count(queue.backlog, "request waits", "requests wait")
            debt = number(queue.debt_ms)
            gpu_time.append(f"Queue {queue.queue}: {backlog} in its backlog; debt {debt} ms of GPU time.")
    models = [] if explanation.models is None else [f"Only models {', '.join(explanation.models)}."]
    for key, own in explanation.key_models.items():
        models.append(f"Key {key}: only models {', '.join(own)}." if own else f"Key {key}: no model of its customer's.")
    quotas = [f"Key {key}: also at most {' and '.join(own)}." for key, own in explanation.key_quotas.items()]
    lines += _block(gpu_time) + _block(models) + _block(quotas) + _block(explanation.why)
    lines += _table(map(_limit, explanation.limits), _LIMITS) + _table(map(_tier, explanation.tiers), _TIERS)
    if len({percent(gateway.factor) for gateway in explanation.gateways}) > 1:  # Else they do not differ.
        gateways = [
            (g.id, percent(g.factor), rate(g.allocated_rps), rate(g.capacity_rps)) for g in explanation.gateways
        ]
        lines += _table(gateways, _GATEWAYS)
    rows = []
    for refusal in explanation.refusals or ():
        by = refusal.refused_by + (f" (and {refusal.more} more like it)" if refusal.more else "")
        rows.append((moment(refusal.at_ms), refusal.request_id, refusal.code, percent(refusal.factor), by))
    if explanation.refusals is not None:
        lines += _table(rows, _REFUSALS) or _block(["No rejection in the last 10 minutes."])
    if explanation.failed is not None:
        failed = [
            (moment(int(each.created_at.timestamp() * 1000)), each.id, each.error_code or NONE)
            for each in explanation.failed
        ]
        lines += _table(failed, _FAILED) or _block(["No accepted request failed in the last hour."])
        lines.append(f"`tierlane requests {explanation.customer} --status failed` lists the failed requests of a day.")
    return [*lines, *_block(explanation.not_read)]


def request_lines(explanation: RequestExplanation) -> list[str]:
    """A request as text."""
    facts = [
        (name, NONE if value is None else number(value) if isinstance(value, float) else str(value))
        for name, value in explanation.facts.items()
    ]
    events = [
        (event["at"], event["event"], f"after {span(max(0, event['after_ms']))}") for event in explanation.timeline
    ]
    blocks = _block(explanation.said) + _table(events) + _table(facts) + _block(explanation.not_read)
    return [explanation.request_id, *blocks]


def _block(lines: Sequence[str]) -> list[str]:
    """Lines after an empty one, or nothing."""
    return ["", *lines] if lines else []


def _table(rows: Iterable[Sequence[str]], *head: Sequence[str]) -> list[str]:
    """Rows in columns below their head, after an empty line; nothing without rows."""
    cells = list(rows)
    return _block(columns([*head, *cells])) if cells else []


def _limit(line: LimitLine) -> Sequence[str]:
    anew = ""
    if line.anew_in_ms is not None:
        used = "" if line.base is None or line.left is None else f"{number(line.base - line.left)} used; "
        anew = f" ({used}resets in {span(line.anew_in_ms)})"
    base, now, left = (NONE if value is None else number(value) for value in (line.base, line.effective, line.left))
    return line.limit, "none" if line.base is None else base, line.of, now, left + anew


def _tier(part: TierPart) -> Sequence[str]:
    shadow = " (shadow)" if part.shadow else ""
    priority = UNKNOWN if part.priority is None else str(part.priority)
    guaranteed = UNKNOWN
    if part.guaranteed_rps is not None and part.guaranteed_share is not None:
        guaranteed = f"{rate(part.guaranteed_rps)} ({percent(part.guaranteed_share)})"
    demand, gets = rate(part.demand_rps), rate(part.allocated_rps)
    return part.name + shadow, priority, guaranteed, demand, gets, percent(part.factor)
