"""Retry-After: when somebody who is turned away for want of capacity should come back, by how fast the line moves."""

LEAST_MS = 100
"""A few milliseconds tell a client to try again at once, and their jitter spreads nobody."""
MOST_MS = 30_000
"""A line that long has moved on before; a client that is told more gives up."""


def retry_after_ms(waiting: int, drain_rps: float, fallback_ms: float) -> int:
    """Milliseconds until `waiting` requests are served at the measured `drain_rps` answers/s, 100 to 30,000.

    `fallback_ms`, within the same bounds, where nothing was answered lately, so that no rate is measured.
    """
    wait_ms = waiting / drain_rps * 1000 if drain_rps > 0 else fallback_ms
    # In this order, max also turns what is not a number into the least.
    return round(min(max(LEAST_MS, wait_ms), MOST_MS))
