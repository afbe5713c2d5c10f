"""What an endpoint turned out to like or not: lists of prompts, tokens at the end of a stream, priorities. Pure."""

ODD_LISTS = 3
"""So many lists in a row that were answered wrongly, each of whose texts alone went well, and no more are sent."""


class Habits:
    """Learnt from answers, for the life of the process."""

    def __init__(self) -> None:
        self.takes_lists = True
        self.tells_usage = True
        """A stream may be asked for its tokens."""
        self.takes_priority = False
        self._odd = 0

    def list_went_well(self) -> None:
        """All of it was answered."""
        self._odd = 0

    def list_failed(self, *, refused: bool, alone_went_well: bool) -> None:
        """It was not answered, or wrongly. `refused`: as a bad request; `alone_went_well`: each text by itself was."""
        if not alone_went_well:
            return  # One of the texts was to blame.
        self._odd += 1
        if refused or self._odd >= ODD_LISTS:
            self.takes_lists = False
