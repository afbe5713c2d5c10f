"""One stream's text, put together from increments that may be lost, late, told twice, or of a run that was lost. Pure.

What was sent is never taken back. So the text that may follow is the one at its end: what overlaps is cut, what leaves
a gap waits for the stored reply, which has everything. Where a run is lost whose text was sent, nothing may follow.
"""

from scheduler.increments import LOST


class Assembly:
    """What was sent of one output, and what may be sent now. `broken`: nothing may, the stream cannot be gone on with."""

    def __init__(self) -> None:
        self._text = ""
        self._attempt = 0
        self.sent_bytes = 0
        """As UTF-8."""
        self.broken = False

    @property
    def length(self) -> int:
        """Characters that were sent."""
        return len(self._text)

    def take(self, attempt: int, offset: int, text: str) -> str:
        """What is to be sent of an increment; "" for nothing."""
        if self.broken or (self.length and attempt < self._attempt):
            return ""
        if self.length and (offset == LOST or attempt > self._attempt):
            self.broken = True
            return ""
        if offset == LOST or offset > self.length:
            return ""
        seen = self.length - offset
        if seen and not self._agrees(offset, text[:seen]):
            self.broken = True
            return ""
        return self._sent(attempt, text[seen:])

    def rest(self, output: str, attempts: int) -> str | None:
        """What is still to be sent of the whole output, that run number `attempts` made; None where it does not go on."""
        if self.broken or (self.length and (attempts != self._attempt or not self._agrees(0, output[: self.length]))):
            self.broken = True
            return None
        return self._sent(attempts, output[self.length :]) if len(output) >= self.length else None

    def _sent(self, attempt: int, text: str) -> str:
        if text:
            self._attempt = attempt
            self._text += text
            self.sent_bytes += len(text) if text.isascii() else len(text.encode())
        return text

    def _agrees(self, offset: int, text: str) -> bool:
        return self._text.startswith(text, offset)
