"""Whether this gateway takes new work: open, then announced as leaving while it still serves, then closed."""


class Doors:
    """Set by the drain; read by readiness, the edge and the handlers."""

    __slots__ = ("closed", "leaving")

    def __init__(self) -> None:
        self.leaving = False  # Not ready any more, but serving: load balancers need a moment to notice.
        self.closed = False  # New requests are refused, and every answer ends its connection.
