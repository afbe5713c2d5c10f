"""The request ids of all answers of a run.

They are kept as 32 hex digits each in one byte array, since a set of a million texts would cost 100 MB.
"""

from tierlane_tools.bench.http_client import BenchResponse, header
from tierlane_tools.bench.verification.fate import Fate

PREFIX = b"req_"
HEX_CHARACTERS = 32
_BODY_START = b'{"request_id":"req_'
_HEX_AT = len(_BODY_START)
_HEX_END = _HEX_AT + HEX_CHARACTERS


def request_id_hex(response: BenchResponse) -> bytes:
    """The 32 hex digits of the answer's request id, from the body of a 200 or the header; empty where it has none."""
    body = response.body
    if body.startswith(_BODY_START):
        digits = body[_HEX_AT:_HEX_END]
    else:
        value = header(response.head, b"x-request-id") or b""
        digits = value[len(PREFIX) :] if value.startswith(PREFIX) else b""
    return digits if len(digits) == HEX_CHARACTERS else b""


class AnswerIds:
    """All ids of a run, warm-up included, by fate."""

    def __init__(self) -> None:
        self._digits = {fate: bytearray() for fate in Fate}
        self._completed = self._digits[Fate.COMPLETED]
        self.without_id = 0  # Answers whose id could not be read.

    def add_completed(self, digits: bytes) -> None:
        """As `add`, for the fate of nearly all: a look-up by an enum's member costs as much as the rest of this."""
        if digits:
            self._completed += digits
        else:
            self.without_id += 1

    def add(self, fate: Fate, digits: bytes) -> None:
        """Note the id of one answer, as `request_id_hex` gave it."""
        if digits:
            self._digits[fate] += digits
        else:
            self.without_id += 1

    def count(self, fate: Fate) -> int:
        """How many answers had this fate and an id."""
        return len(self._digits[fate]) // HEX_CHARACTERS

    def of(self, fate: Fate) -> list[str]:
        """The ids of this fate as `req_...`, in the order of the answers."""
        digits = self._digits[fate].decode("latin-1")
        return ["req_" + digits[at : at + HEX_CHARACTERS] for at in range(0, len(digits), HEX_CHARACTERS)]

    def repeated(self) -> int:
        """Answers whose id another answer had before: the mark of one result given out twice."""
        everything = [name for fate in Fate for name in self.of(fate)]
        return len(everything) - len(set(everything))
