"""Whether this gateway takes new work: open, then announced as leaving while it still serves, then closed."""


class Doors:
    """Set by the drain; read by readiness, the edge and the handlers."""

    __slots__ = ("closed", "leaving")

    def __init__(self) -> None:
        # Not ready any more, but serving: load balancers need a moment to notice. Every answer ends its connection, so
        # that few clients are left to ask on a connection that closes at that moment.
        self.leaving = False
        self.closed = False  # New requests are refused.
