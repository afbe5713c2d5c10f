"""Large chats beside Redis: files in a directory that gateways and workers of one host share, best in shared memory.

A chat of several megabytes, mostly images, would fill Redis and travel through it twice. Its gateway writes it to a file
and the stored request names the file: the id of the request instead of a JSON object, which begins with a brace. The file
has this name as long as the gateway waits for the response. If the gateway dies, so does the connection of its client; its
files are removed by any gateway of the host, once they are older than any request.

New pages of shared memory cost five times as much as the copy into them. So the next chat is written over a file that is no
longer needed; without one, the file is removed within seconds.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from scheduler.errors import StartError
from scheduler.tasks import Loop

_NAME = re.compile(r"req_[0-9a-f]{32}")
_SPARE = "spare_"
"""Prefix of the name of a file that the next chat is written over."""

SPARE_BYTES = 64 << 20
"""Bytes of such files of one gateway."""

SPARE_S = 60.0
"""Files are kept for this time beyond the longest request, for steps of the clock."""

SWEEP_S = 10.0
"""Seconds between two searches for files of dead gateways, and until a file that is not written over is removed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # From malloc.h.
_KEPT_BYTES, _LARGEST_KEPT_BYTES = 64 << 20, 32 << 20


def is_reference(text: str) -> bool:
    """Whether the input of a chat is the name of a file instead of the chat itself."""
    return _NAME.fullmatch(text) is not None


class BodyStore:
    """The files of one gateway. Chats of at most `inline_bytes` stay in Redis; at most `max_bytes` are stored at a time.

    Without a directory nothing is stored. `longest_s`: no request takes longer.
    """

    def __init__(
        self,
        directory: Path | None = None,
        inline_bytes: int = 0,
        max_bytes: int = 0,
        longest_s: float = 0.0,
        clock: Callable[[], float] = time.time,  # As files have it; the directory is on this host.
    ) -> None:
        self._directory = directory
        self._inline_bytes = inline_bytes
        self._max_bytes = max_bytes
        self._longest_s = longest_s
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._spares: list[tuple[Path, int]] = []  # With their sizes.
        self.stored_bytes = 0

    def open(self) -> None:
        """Make the directory, for this user alone, and remove what dead gateways left. Raises StartError."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.stat(self._directory).st_uid not in (os.getuid(), 0):  # It could exchange the files.  # noqa: PTH116
                raise StartError(f"TIERLANE_BODY_DIR: {str(self._directory)!r} belongs to another user.")
            self.remove_old()
        except OSError as error:
            why = error.strerror or str(error)
            raise StartError(f"TIERLANE_BODY_DIR: {str(self._directory)!r} cannot be used: {why}.") from None

    def takes(self, size: int) -> bool:
        """Whether a chat of so many bytes belongs into a file."""
        return self._directory is not None and size > self._inline_bytes

    def put(self, request_id: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write the chat of this request; False if there is no room for it."""
        keep_freed_memory()
        size = sum(map(len, parts))
        if self._directory is None or self.stored_bytes + size > self._max_bytes:
            return False
        path = self._directory / request_id
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # Something may have cleaned up.
            if self._spares:
                with contextlib.suppress(FileNotFoundError):
                    self._spares.pop()[0].rename(path)
            if self.stored_bytes + self._spare_bytes + size > self._max_bytes:
                self._remove_spares()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                file.writelines(parts)
                file.truncate()
        except OSError:  # The file system is full.
            path.unlink(missing_ok=True)
            return False
        self._sizes[request_id] = size
        self.stored_bytes += size
        return True

    def discard(self, request_id: str) -> None:
        """The response of this request is no longer needed."""
        if not self._sizes or self._directory is None:
            return
        size = self._sizes.pop(request_id, None)
        if size is not None:
            self.stored_bytes -= size
            path, spare = self._directory / request_id, self._directory / (_SPARE + request_id)
            with contextlib.suppress(OSError):
                if self._spare_bytes + size > SPARE_BYTES:
                    path.unlink()
                else:
                    path.rename(spare)
                    self._spares.append((spare, size))

    @property
    def _spare_bytes(self) -> int:
        return sum(size for _, size in self._spares)

    def _remove_spares(self) -> None:
        for path, _ in self._spares:
            with contextlib.suppress(OSError):
                path.unlink()
        self._spares.clear()

    def loops(self) -> dict[str, Loop]:
        """The background tasks, by name."""
        return {} if self._directory is None else {"large chats": self._sweep}

    async def _sweep(self) -> None:
        """Remove files of dead gateways: the one that replaces a dead gateway finds them too young at its start."""
        while True:
            try:
                await asyncio.sleep(SWEEP_S)
            finally:
                self._remove_spares()
            with contextlib.suppress(OSError):  # The directory is removed with its stack.
                await asyncio.to_thread(self.remove_old)  # Thousands of files take milliseconds.

    def remove_old(self) -> None:
        """Remove files of gateways that are gone: those older than any request can be. Raises OSError."""
        if self._directory is None:
            return
        before = self._clock() - self._longest_s - SPARE_S
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):  # Another gateway was faster.
                if is_reference(path.name.removeprefix(_SPARE)) and path.stat().st_mtime < before:
                    path.unlink()


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB that it freed, so that the next large chats get pages that exist.

    By default the C library returns the memory of each copy of a large chat, and half of the time that a process needs for
    such a chat goes into new pages. Called with the first one, so that other processes keep no more than before.
    """
    with contextlib.suppress(OSError, AttributeError):  # Not every C library has it.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


class StoredChat:
    """The chat in a file. Its methods raise OSError if it is not there: its request has ended, or came from another host."""

    def __init__(self, directory: str, name: str) -> None:
        if not directory or not is_reference(name):
            raise FileNotFoundError
        self._path = Path(directory) / name
        self.size = self._path.stat().st_size

    def pieces(self, begin: int, most: int) -> Iterator[bytes]:
        """Its bytes from `begin` on, at most so many at a time: many chats that are sent at a time need little memory."""
        keep_freed_memory()
        with self._path.open("rb", buffering=0) as file:
            file.seek(begin)
            while piece := file.read(most):
                self._path.stat()  # Without its name, the file may have been written over.
                yield piece
