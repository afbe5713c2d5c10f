"""How long an endpoint is left alone, and after how many failures. Pure."""

STRIKES = 3
"""So many batches in a row that reached nobody, and no more are tried until a look at the endpoint succeeds."""
FIRST_S, LONGEST_BUSY_S, LONGEST_LOOK_S = 0.25, 8.0, 5.0


class Pauses:
    """Seconds to wait, longer each time; one batch that goes well, and everything begins anew."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A batch was answered."""
        self._failed = 0
        self._busy_s = self._look_s = FIRST_S

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

    def look_s(self) -> float:
        """Until the next look at an endpoint that is away."""
        wait_s, self._look_s = self._look_s, min(LONGEST_LOOK_S, 2 * self._look_s)
        return wait_s
