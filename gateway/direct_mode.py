"""When requests go to the workers past Redis, and when they go through Redis again. No I/O, no clock of its own.

    off      requests are admitted through Redis
    on       Redis is away: requests go to workers directly
    leaving  Redis has been well for long enough: new requests are admitted there, and what was taken is served to its end

Coming back takes five seconds without one failed call, so that a Redis that comes and goes does not make every request
change sides; where no worker can be called directly, staying would serve nobody, and the change is made at once.
"""

from enum import StrEnum

LEAVE_AFTER_S = 5.0


class Mode(StrEnum):
    """The way that requests go."""

    OFF = "off"  # Through Redis.
    ON = "on"  # Past Redis.
    LEAVING = "leaving"  # New ones through Redis; those that were taken past it are served to their end.


class DirectMode:
    """The policy. Times are monotonic seconds."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._well_since: float | None = None
        self.mode = Mode.OFF
        self.since = 0.0  # When it was entered; stands while the mode is not OFF.

    def look(self, now: float, *, redis_open: bool, redis_well: bool, can_serve: bool, waiting: int) -> Mode:
        """The mode from now on.

        `redis_open`: its breaker is not closed. `redis_well`: it is closed and the last call was answered. `waiting`:
        requests that were taken past Redis and have no answer yet.
        """
        if redis_open:
            self._enter(now)
        elif self.mode is not Mode.OFF:
            self._come_back(now, redis_well=redis_well, can_serve=can_serve, waiting=waiting)
        return self.mode

    def _enter(self, now: float) -> None:
        if self.mode is Mode.OFF:
            self.since = now
        self.mode = Mode.ON
        self._well_since = None

    def _come_back(self, now: float, *, redis_well: bool, can_serve: bool, waiting: int) -> None:
        if not redis_well:
            self._well_since = None
            return
        if self._well_since is None:
            self._well_since = now
        if self.mode is Mode.ON and (not can_serve or now - self._well_since >= self._leave_after_s):
            self.mode = Mode.LEAVING
        if self.mode is Mode.LEAVING and not waiting:
            self.mode = Mode.OFF
