"""A little load after the last fault, until every gateway has completed a request: what is stuck must not look idle.

It goes on for longer than the checker allows a gateway to be stuck, so that one that is will be seen.
"""

import time

from tierlane.chaos.history import Answered, Event, History, Invoked
from tierlane.chaos.load import Load
from tierlane.chaos.plan import Target

ROUND_S = 1.0
RATE = 20.0
PATIENCE_S = 20.0


async def encore(target: Target, seed: int, history: History) -> None:
    """Send until all serve, or patience is over; the checker says what that means."""
    deadline = time.monotonic() + PATIENCE_S
    since = len(history.events)
    while time.monotonic() < deadline and _serving(history.events[since:]) < len(target.http_urls):
        await Load(target, RATE, ROUND_S, seed, history).run()


def _serving(events: list[Event]) -> int:
    """How many gateways have completed something."""
    gateways = {(event.nonce, event.turn): event.gateway for event in events if isinstance(event, Invoked)}
    answers = (event for event in events if isinstance(event, Answered) and event.status == 200)
    return len({gateways[event.nonce, event.turn] for event in answers if (event.nonce, event.turn) in gateways})
