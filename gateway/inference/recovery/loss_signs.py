"""Signs that Redis may have lost data."""

OTHER_EPOCH = "its epoch changed"
UNAVAILABLE = "it was unavailable"


class LossSigns:
    """Signs of a loss, from heartbeats."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._missed = False

    def heartbeat(self, epoch_us: int) -> str | None:
        """A heartbeat succeeded. Returns the reason why Redis may have lost data, or None."""
        reason = None
        if self._epoch is not None and epoch_us != self._epoch:
            reason = OTHER_EPOCH
        elif self._missed:
            reason = UNAVAILABLE
        self._epoch, self._missed = epoch_us, False
        return reason

    def missed(self) -> None:
        """A heartbeat failed."""
        self._missed = True
