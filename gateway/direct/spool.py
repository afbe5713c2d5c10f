"""The audit spool: records of requests that were served without Redis, in files of checksummed lines. Blocking.

    <directory>/<owner>.log        the current file; <owner> is the id of a gateway
    <directory>/<owner>.log.<n>    closed; removed once it is merged into Redis
    <directory>/<owner>.bad        lines that could not be read
    <directory>/<owner>.lock       locked by the running gateway; if it is not locked, any gateway may merge the files

A line is `1 <crc32> <base64 of msgpack [accepted, ended]>`: a version, a checksum of the rest, and one entry. `ended` is
nil in the entry that is written before a request is sent to a worker. The complete pair follows in a later line, maybe in
another file; if the gateway crashed, there is none. Only the owner writes to its files, from one thread.
"""

import base64
import binascii
import contextlib
import fcntl
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.inference.audit_pairs import SpoolEntry
from scheduler.errors import TierlaneError

VERSION = b"1"
MAX_LINE_BYTES = 16_384
FOLDER = "spool"

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[SpoolEntry] = msgspec.msgpack.Decoder(SpoolEntry)


class SpoolError(TierlaneError):
    """The spool cannot be written: it is full, or writing failed."""


class SpoolFull(SpoolError):
    """The entries do not fit; entries with reserved space may fit."""


class Part(NamedTuple):
    """A part of a file: its entries, its unreadable lines, and the offset of the next part."""

    entries: list[SpoolEntry]
    bad: list[bytes]
    next_offset: int


def to_line(entry: SpoolEntry) -> bytes:
    """Encode an entry as a line."""
    text = base64.b64encode(_encode(entry))
    return b"%s %08x %s\n" % (VERSION, zlib.crc32(text), text)


def from_line(line: bytes) -> SpoolEntry | None:
    """The entry of a line that ends with a newline; None if it is incomplete, damaged, or of another version."""
    version, _, rest = line.partition(b" ")
    checksum, _, text = rest.partition(b" ")
    if version != VERSION or not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    try:
        return _decoder.decode(base64.b64decode(text[:-1], validate=True))
    except (binascii.Error, msgspec.MsgspecError):
        return None


class Spool:
    """The spool files of this gateway, and of stopped gateways in the same directory."""

    def __init__(self, directory: Path, owner: str, max_bytes: int) -> None:
        self._directory = directory
        self._owner = owner
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._size = 0  # Of the current file, up to its last complete line.
        self._lock: int | None = None
        self.bytes = 0  # In all files of this gateway.
        self.reserved = 0  # Bytes reserved for ended records.
        self.bad_lines = 0

    def open(self) -> None:
        """Create the directory and lock the files. Raises SpoolError if another running gateway has the same name."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(self._path("lock"))
            if self._lock is not None:
                self.rotate()  # The file of a previous process may end in the middle of a line.
        except OSError as error:
            raise SpoolError(f"The spool {self._directory} cannot be used: {_why(error)}.") from error
        if self._lock is None:
            raise SpoolError(f"Another gateway named {self._owner} uses the spool {self._directory}.")
        self.bytes = sum(path.stat().st_size for path in self._files(self._owner))

    def close(self) -> None:
        """Close the files and release the lock. Remaining files are left for the next gateway."""
        self._close_file()
        if self._lock is not None:
            if not self._files(self._owner):
                self._path("lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    @property
    def full(self) -> bool:
        """Whether one more line may not fit."""
        return self.bytes + self.reserved + MAX_LINE_BYTES > self._max_bytes

    def append(self, entries: Iterable[SpoolEntry], reserve: int = 0) -> None:
        """Write entries, leave `reserve` bytes free, and wait until the data is on disk.

        Raises SpoolFull and other SpoolErrors; then no entry is written.
        """
        data = b"".join(to_line(entry) for entry in entries)
        if self.bytes + len(data) + reserve > self._max_bytes:
            raise SpoolFull(self._full_message())
        try:
            self._write(data)
        except OSError as error:
            # Truncate an incomplete line and start another file, so that no line is appended to a damaged one.
            with contextlib.suppress(OSError):
                if self._file is not None:
                    os.ftruncate(self._file, self._size)
            with contextlib.suppress(OSError):
                self.rotate()
            raise SpoolError(f"The spool cannot be written: {_why(error)}.") from error
        self._size += len(data)
        self.bytes += len(data)
        self.reserved = reserve

    def test_write(self) -> None:
        """Check whether a line could be written. Raises SpoolFull and other SpoolErrors."""
        if self.full:
            raise SpoolFull(self._full_message())
        path = self._path("try")
        try:
            self._write(b"")  # Fails if the current file is the problem.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, bytes(MAX_LINE_BYTES))
                os.fsync(handle)
            finally:
                os.close(handle)
                path.unlink(missing_ok=True)
        except OSError as error:
            raise SpoolError(f"The spool cannot be written: {_why(error)}.") from error

    def _full_message(self) -> str:
        return f"The spool is full: {self.bytes} of {self._max_bytes} bytes wait for Redis."

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)  # Makes the new file durable.
            finally:
                os.close(directory)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)

    def rotate(self) -> None:
        """Close the current file, so that it can be merged; the next line starts another file. Raises OSError."""
        self._close_file()
        current = self._path("log")
        if current.exists() and not current.stat().st_size:
            current.unlink()
        elif current.exists():
            numbers = [int(path.suffix[1:]) for path in self._files(self._owner) if path.suffix != ".log"]
            current.rename(f"{current}.{max(numbers, default=0) + 1}")

    def to_merge(self) -> list[Path]:
        """The closed files of this gateway, the oldest first. Raises OSError."""
        return sorted((p for p in self._files(self._owner) if p.suffix != ".log"), key=lambda p: int(p.suffix[1:]))

    def dead_owners(self) -> list[str]:
        """Other gateways with files here, running or not; `take_over` distinguishes. Raises OSError."""
        owners = {path.name.partition(".log")[0] for path in self._directory.glob("*.log*")}
        return sorted(owners - {self._owner})

    def take_over(self, owner: str) -> tuple[int, list[Path]] | None:
        """Lock and return the files of a stopped gateway; None if it is running. Raises OSError."""
        lock = _locked(self._path("lock", owner))
        return None if lock is None else (lock, self._files(owner))

    def finish(self, owner: str, lock: int) -> None:
        """Remove and release the lock of a stopped gateway whose files are merged. Raises OSError."""
        if not self._files(owner):
            self._path("lock", owner).unlink(missing_ok=True)
        os.close(lock)

    def read(self, path: Path, offset: int, most: int) -> Part:
        """Read up to `most` lines from `offset` on. Raises OSError."""
        part = Part([], [], offset)
        with path.open("rb") as file:
            file.seek(offset)
            while len(part.entries) + len(part.bad) < most and (line := file.readline(MAX_LINE_BYTES)):
                entry = from_line(line)
                part.bad.append(line) if entry is None else part.entries.append(entry)
            return part._replace(next_offset=file.tell())

    def set_aside(self, path: Path, lines: list[bytes]) -> None:
        """Copy unreadable lines to the `.bad` file. Raises OSError."""
        self.bad_lines += len(lines)
        owner = path.name.partition(".log")[0]
        with self._path("bad", owner).open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)

    def remove(self, path: Path) -> None:
        """Remove a merged file. Raises OSError."""
        size = path.stat().st_size
        path.unlink()
        if path.name.partition(".log")[0] == self._owner:
            self.bytes = max(0, self.bytes - size)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _files(self, owner: str) -> list[Path]:
        numbered = (p for p in self._directory.glob(f"{owner}.log.*") if p.suffix[1:].isdigit())
        return [*self._directory.glob(f"{owner}.log"), *numbered]

    def _path(self, suffix: str, owner: str | None = None) -> Path:
        return self._directory / f"{owner or self._owner}.{suffix}"


def _locked(path: Path) -> int | None:
    """Open and lock a file; None if another process has locked it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
