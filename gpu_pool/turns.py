"""Turns at a model, in the order of coming: one at a time, or as many as it takes."""

import asyncio


class Turns(asyncio.Semaphore):
    """A semaphore whose size may change. Made smaller, it takes back turns as they end: none is cut short."""

    def __init__(self) -> None:
        super().__init__(1)
        self.width = 1
        self._owed = 0

    def resize(self, width: int) -> None:
        """Let so many run at a time from now on."""
        self._owed += self.width - width
        self.width = width
        while self._owed < 0:
            self._owed += 1
            super().release()

    def release(self) -> None:
        """A turn has ended."""
        if self._owed > 0:
            self._owed -= 1
        else:
            super().release()
