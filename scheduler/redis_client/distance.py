"""The distance to a server: its measured round trip, and the time limits that follow from it. Pure.

A call on an open connection takes one round trip, and a new connection several. Limits sized for a nearby
server make every connection to one 90 ms away fail. Each client measures the round trip when it connects, and adds it to its
limits, up to MOST_ROUND_TRIP_S: leases (600 ms) and heartbeats allow no more.

Before the first measurement a server may be as far as the bound. After an attempt that took too long, the next one may
take longer, because the primary may be another server now. Nothing is sent to measure: a connection reads its id anyway.
"""

MOST_ROUND_TRIP_S = 0.15
"""The longest round trip with which the times of leases and heartbeats hold."""

NEAR_S = 0.02
"""A longer round trip is measured again: the server or this process may have been suspended."""

TRIPS_TO_CONNECT = 7
"""TCP, two of TLS, login, database, connection id, and this one again."""

TRIPS_TO_FIND = 5
"""TCP, two of TLS, login, and the question where the primary is."""

HEARTBEATS = 16
"""The shortest of so many heartbeats counts as the round trip."""


class Distance:
    """The distance of one client to its server. `trips`: for a new connection; `round_trip_s`: None if not yet measured."""

    def __init__(self, trips: int = TRIPS_TO_CONNECT, round_trip_s: float | None = None) -> None:
        self.round_trip_s = round_trip_s
        self._trips = trips
        self._doubt_s = 0.0  # After attempts that took too long: what the round trip may be.
        self._least_s, self._heartbeats = MOST_ROUND_TRIP_S, 0

    @property
    def call_s(self) -> float:
        """What is added to the limit of a call on an open connection."""
        return MOST_ROUND_TRIP_S if self.round_trip_s is None else min(MOST_ROUND_TRIP_S, self.round_trip_s)

    @property
    def _assumed_s(self) -> float:
        return max(self.call_s, self._doubt_s)

    @property
    def connect_s(self) -> float:
        """What is added to the limit of a call that may need a connection."""
        return self._trips * self._assumed_s

    @property
    def find_s(self) -> float:
        """What is added to the limit of each server that is asked for the primary."""
        return TRIPS_TO_FIND * self._assumed_s

    @property
    def slack_s(self) -> float:
        """What a new connection and its first call take longer than beside the server; 0.0 if not yet measured."""
        return 0.0 if self.round_trip_s is None else self._trips * self.call_s

    def measured(self, round_trip_s: float) -> None:
        """A connection was made, with this round trip."""
        self.round_trip_s, self._doubt_s = round_trip_s, 0.0
        self._least_s, self._heartbeats = round_trip_s, 0

    def timed_out(self) -> None:
        """An attempt to connect took too long."""
        self._doubt_s = min(MOST_ROUND_TRIP_S, max(NEAR_S, 2 * self._doubt_s))

    def beat(self, took_s: float) -> None:
        """A heartbeat took this time."""
        self._least_s = min(self._least_s, took_s) if self._heartbeats else took_s
        self._heartbeats += 1
        if self._heartbeats == HEARTBEATS:
            self.round_trip_s, self._heartbeats = self._least_s, 0


def too_far(round_trip_s: float | None) -> str | None:
    """A sentence about a server beyond the bound; None for others."""
    if round_trip_s is None or round_trip_s <= MOST_ROUND_TRIP_S:
        return None
    return (
        f"The round trip to Redis takes {1000 * round_trip_s:,.0f} ms; calls, leases and heartbeats allow at most "
        f"{1000 * MOST_ROUND_TRIP_S:.0f} ms."
    )
