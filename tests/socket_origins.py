"""Names in the representation of a socket, and so in warnings of an unclosed one, the test and the code that made it.

A socket that a test leaves open in a reference cycle is found by a collection in a later test.
"""

import os
import socket
import sys
from collections import OrderedDict
from types import FrameType

KEPT = 20_000
FRAMES = 12

_origins: OrderedDict[int, str] = OrderedDict()
_plain = socket.socket.__repr__


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event != "socket.__new__":
        return
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < FRAMES:
        lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    _origins.pop(id(arguments[0]), None)
    _origins[id(arguments[0])] = f"{os.environ.get('PYTEST_CURRENT_TEST', '')}, {' < '.join(lines)}"
    if len(_origins) > KEPT:
        _origins.popitem(last=False)


def _named(self: socket.socket) -> str:
    return f"{_plain(self)} of {_origins.get(id(self), 'unknown origin')}"


def name_origins() -> None:
    """From now on, in this process."""
    sys.addaudithook(_note)
    socket.socket.__repr__ = _named  # type: ignore[method-assign]
