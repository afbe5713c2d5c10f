"""Recovery: the time from a heal to the first second in which all requests succeed."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from tierlane_tools.chaos.history import Answered, Event, FaultEvent, FaultPhase, Invoked, Recovery

WINDOW_S = 1.0
STEP_S = 0.1
OK_STATUS = 200


def recoveries(events: Iterable[Event], faults: Sequence[FaultEvent], load_ended: float) -> list[Recovery]:
    """The recovery of each fault that was healed without error, by the sending times of tries."""
    at_try: dict[tuple[str, int], float] = {}
    succeeded: set[tuple[str, int]] = set()
    for event in events:
        if isinstance(event, Invoked):
            at_try[event.nonce, event.turn] = event.at
        elif isinstance(event, Answered) and event.status == OK_STATUS:
            succeeded.add((event.nonce, event.turn))
    sent = sorted(at_try.values())
    failed = sorted(at for one, at in at_try.items() if one not in succeeded)
    found: list[Recovery] = []
    for fault in faults:
        if fault.what is not FaultPhase.HEAL or fault.error:
            continue
        begin, seconds = fault.at, None
        while seconds is None and begin + WINDOW_S <= load_ended:
            if _count(sent, begin) and not _count(failed, begin):
                seconds = round(begin - fault.at, 1)
            begin += STEP_S
        found.append(Recovery(fault, seconds))
    return found


def _count(times: Sequence[float], begin: float) -> int:
    return bisect_left(times, begin + WINDOW_S) - bisect_left(times, begin)
