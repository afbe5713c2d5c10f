"""The lost gateways of a pool.

A gateway that shuts down is removed from the list at once, so a silent gateway is lost, until another one starts in its
place under another name.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.heartbeat import BEAT_S

GATEWAY_SILENT_MS = 4000 * BEAT_S
"""A gateway without heartbeats for this time is lost. A second later Redis removes it."""

GATEWAY_LOSS_KEEP_MS = 5 * 60_000
"""A gateway that is not replaced within this time is no longer reported."""


class LostGateway(NamedTuple):
    """`at_ms`: its last heartbeat, by Redis' wall clock."""

    gateway: str
    at_ms: int


class GatewayLosses:
    """The lost gateways of one pool. `update` is called with each new observation."""

    def __init__(self) -> None:
        self._lost: dict[str, LostGateway] = {}
        self._first_seen: dict[str, int] = {}  # Listed gateways, and when each was first observed.
        self._replacements: set[str] = set()  # Gateways that count as the replacement of a lost one.

    def update(self, ages_ms: Mapping[str, float], now_ms: int) -> None:
        """Process the age of each gateway's last heartbeat."""
        # A gateway that has just started, perhaps as a replacement, does not know which others started after a loss.
        # It reports only gateways whose last heartbeat is later than one heartbeat before its first observation.
        first_ms = now_ms if self._first_seen else now_ms - round(1000 * BEAT_S)
        self._first_seen = {name: self._first_seen.get(name, first_ms) for name in ages_ms}
        self._replacements &= ages_ms.keys()
        silent = silent_gateways(ages_ms)
        for name in silent:
            self._lost.setdefault(name, LostGateway(name, now_ms - round(ages_ms[name])))
        for each in sorted(self._lost.values(), key=lambda lost: lost.at_ms):
            if each.gateway in silent:  # It is still listed, and reported even if its replacement has started.
                continue
            resolved = each.gateway in self._first_seen or now_ms - each.at_ms > GATEWAY_LOSS_KEEP_MS
            if not resolved:
                started = (name for name, at_ms in self._first_seen.items() if at_ms >= each.at_ms)
                replacement = next((name for name in started if name not in self._replacements), None)
                if replacement is not None:
                    self._replacements.add(replacement)
                    resolved = True
            if resolved:
                del self._lost[each.gateway]

    @property
    def all(self) -> tuple[LostGateway, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda lost: lost.at_ms, reverse=True))


def silent_gateways(ages_ms: Mapping[str, float]) -> Sequence[str]:
    """Listed gateways whose last heartbeat is older than GATEWAY_SILENT_MS."""
    return sorted(name for name, age_ms in ages_ms.items() if age_ms >= GATEWAY_SILENT_MS)
