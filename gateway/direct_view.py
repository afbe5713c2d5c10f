"""Direct mode as health tells it: what is seen, and a finding for each thing that can be wrong. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.direct_probe import Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectView:
    """One look at direct mode."""

    active: bool  # Requests go past Redis, or did until a moment ago and some are still served so.
    for_s: float
    workers: int  # That can be called.
    serves: bool
    waiting: int
    spool_bytes: int
    spool_problem: str | None
    bad_lines: int  # Of spools, set aside.
    unreachable: tuple[Unreachable, ...] = ()  # Direct endpoints that cannot be used from here.
    breakers: Mapping[str, str] = field(default_factory=dict)  # Dependency -> state.
