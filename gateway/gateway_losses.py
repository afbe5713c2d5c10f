"""Which gateways were lost, and when: one that falls silent without having left, until another one begins in its place.

A gateway that leaves in order takes itself off the list at once, so it is never seen silent. Another process that takes a
lost one's place has another name: what is missed is a gateway, not that one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.heartbeat import BEAT_S

SILENT_MS = 4000 * BEAT_S
"""A gateway that was silent for so long is missed. A second later Redis forgets it."""

KEEP_MS = 5 * 60_000
"""Whoever does not replace it in so long does not want to."""


class LostGateway(NamedTuple):
    """`at_ms`: its last heartbeat, by Redis' wall clock."""

    gateway: str
    at_ms: int


class GatewayLosses:
    """Those of one pool. `note` is called with every fresh look."""

    def __init__(self) -> None:
        self._lost: dict[str, LostGateway] = {}
        self._begun: dict[str, int] = {}  # Who is on the list, and when it was first seen there.
        self._heirs: set[str] = set()  # Who has taken a lost one's place.

    def note(self, ages_ms: Mapping[str, float], now_ms: int) -> None:
        """Take the age of each gateway's last heartbeat."""
        # A gateway that has just started, perhaps in place of a lost one, cannot tell which of the others began after
        # that loss. It reports only gateways whose last heartbeat is later than one heartbeat before its first look.
        begun_ms = now_ms if self._begun else now_ms - round(1000 * BEAT_S)
        self._begun = {name: self._begun.get(name, begun_ms) for name in ages_ms}
        self._heirs &= ages_ms.keys()
        unheard = silent(ages_ms)
        for name in unheard:
            self._lost.setdefault(name, LostGateway(name, now_ms - round(ages_ms[name])))
        for each in sorted(self._lost.values(), key=lambda lost: lost.at_ms):
            # One that is still on the list is told, even if another is there already.
            if each.gateway not in unheard and self._is_over(each, now_ms):
                del self._lost[each.gateway]

    def _is_over(self, lost: LostGateway, now_ms: int) -> bool:
        """Whether it is back, or too long ago, or another one has begun since, whose place that is from now on."""
        if lost.gateway in self._begun or now_ms - lost.at_ms > KEEP_MS:
            return True
        heirs = (name for name, at_ms in self._begun.items() if at_ms >= lost.at_ms and name not in self._heirs)
        heir = next(heirs, None)
        if heir is not None:
            self._heirs.add(heir)
        return heir is not None

    @property
    def all(self) -> tuple[LostGateway, ...]:
        """The latest first."""
        return tuple(sorted(self._lost.values(), key=lambda lost: lost.at_ms, reverse=True))


def silent(ages_ms: Mapping[str, float]) -> Sequence[str]:
    """Who is missed by this look."""
    return sorted(name for name, age_ms in ages_ms.items() if age_ms >= SILENT_MS)
