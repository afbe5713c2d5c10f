"""How long after each heal the load was whole again: from the heal to the first second in which everything succeeded."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from tierlane.chaos.history import Answered, Event, Invoked
from tierlane.chaos.plan import FaultEvent, Recovery, What

WINDOW_S = 1.0
STEP_S = 0.1
OK = 200


def recoveries(events: Iterable[Event], faults: Sequence[FaultEvent], load_ended: float) -> list[Recovery]:
    """One for each fault that was healed without error. Times are those of the tries' sending."""
    sent, failed = _tries(events)
    healed = [fault for fault in faults if fault.what is What.HEAL and not fault.error]
    return [Recovery(fault, _seconds(fault.at, sent, failed, load_ended)) for fault in healed]


def _tries(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """When tries were sent, and when those that did not succeed were; both in order."""
    sent: dict[tuple[str, int], float] = {}
    succeeded: set[tuple[str, int]] = set()
    for event in events:
        if isinstance(event, Invoked):
            sent[event.nonce, event.turn] = event.at
        elif isinstance(event, Answered) and event.status == OK:
            succeeded.add((event.nonce, event.turn))
    return sorted(sent.values()), sorted(at for one, at in sent.items() if one not in succeeded)


def _seconds(healed: float, sent: Sequence[float], failed: Sequence[float], load_ended: float) -> float | None:
    begin = healed
    while begin + WINDOW_S <= load_ended:
        if _count(sent, begin) and not _count(failed, begin):
            return round(begin - healed, 1)
        begin += STEP_S
    return None


def _count(times: Sequence[float], begin: float) -> int:
    return bisect_left(times, begin + WINDOW_S) - bisect_left(times, begin)
