"""How long an endpoint is left alone, and after how many failures. Pure."""

STRIKES = 3
"""So many batches in a row that reached nobody, and no more are tried until a look at the endpoint succeeds."""
FIRST_S, LONGEST_BUSY_S, LONGEST_LOOK_S = 0.25, 8.0, 5.0
BRIEF_S = 1.5
"""An endpoint that answered and then asked to be left alone for so long in all, and no longer, is busy; beyond that it is as
good as away. Gateways wait for two seconds (gateway/limits/capacity.py) before they refuse for want of GPUs: they hear of it earlier.
"""


class Pauses:
    """Seconds to wait, longer each time; one batch that goes well, and everything begins anew."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A batch was answered."""
        self._failed = 0
        self._busy_s = self._look_s = FIRST_S
        self._left_alone_s = 0.0

    def failed(self) -> bool:
        """A batch reached nobody; whether that is enough."""
        self._failed += 1
        return self._failed >= STRIKES

    def busy_s(self, asked_s: float | None) -> float:
        """The server takes nothing: what it asks for, else ever longer."""
        if asked_s is not None:
            return asked_s
        wait_s, self._busy_s = self._busy_s, min(LONGEST_BUSY_S, 2 * self._busy_s)
        return wait_s

    def brief(self, wait_s: float) -> bool:
        """The server is left alone for so long again; whether all of it since the last answer is but a short pause."""
        self._left_alone_s += wait_s
        return self._left_alone_s <= BRIEF_S

    def look_s(self) -> float:
        """Until the next look at an endpoint that is away."""
        wait_s, self._look_s = self._look_s, min(LONGEST_LOOK_S, 2 * self._look_s)
        return wait_s
