"""The final load, sent when every fault is healed: until every gateway has completed a request."""

import time

from tierlane_tools.chaos.history import Answered, History, Invoked, Target
from tierlane_tools.chaos.load.chats import ChatLoad
from tierlane_tools.chaos.load.requests import ChaosLoad

ROUND_S = 1.0
RATE = 20.0
FINAL_LOAD_PATIENCE_S = 20.0


def load_of(target: Target, rate: float, duration_s: float, seed: int, history: History) -> ChaosLoad:
    """The load for the backend of this target."""
    return (ChatLoad if target.is_engine else ChaosLoad)(target, rate, duration_s, seed, history)


async def final_load(target: Target, seed: int, history: History) -> None:
    """Send requests until every gateway serves, or the time is over."""
    deadline = time.monotonic() + FINAL_LOAD_PATIENCE_S
    since = len(history.events)
    while time.monotonic() < deadline:
        events = history.events[since:]
        gateways = {(event.nonce, event.turn): event.gateway for event in events if isinstance(event, Invoked)}
        answers = [event for event in events if isinstance(event, Answered) and event.status == 200]
        serving = {gateways[event.nonce, event.turn] for event in answers if (event.nonce, event.turn) in gateways}
        if len(serving) >= len(target.http_urls):
            return
        await load_of(target, RATE, ROUND_S, seed, history).run()
