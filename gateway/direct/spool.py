"""The audit of what was answered while Redis was away: files of checksummed lines that outlive this process. Blocking.

    <directory>/<owner>.log        what is appended to now; <owner> is the id of a gateway
    <directory>/<owner>.log.<n>    closed, waiting to be merged; removed after that
    <directory>/<owner>.bad        lines that could not be read, set aside
    <directory>/<owner>.lock       locked while its gateway lives; without the lock its files are anybody's to merge

A line is `1 <crc32> <base64 of msgpack [accepted, ended]>`: a version, a checksum over what follows it, and one note.
`ended` is nil where the request was only about to be sent to a worker; its pair comes in a later line, be it in another
file, or never, where the gateway died meanwhile.
Nobody but the owner writes to its files, and only from one thread.
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

from gateway.inference.recovery import Note
from scheduler.errors import TierlaneError

VERSION = b"1"
MAX_LINE_BYTES = 16_384
FOLDER = "spool"

_encode = msgspec.msgpack.Encoder().encode
_note: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


class SpoolError(TierlaneError):
    """The spool cannot be written: it is full, or the disk refuses."""


class SpoolFull(SpoolError):
    """There is no room for these; others may still have theirs."""


class Part(NamedTuple):
    """Some lines of a file: the notes, the lines that could not be read, and where the next part begins."""

    notes: list[Note]
    bad: list[bytes]
    next_offset: int


def to_line(note: Note) -> bytes:
    """One note as a line."""
    text = base64.b64encode(_encode(note))
    return b"%s %08x %s\n" % (VERSION, zlib.crc32(text), text)


def from_line(line: bytes) -> Note | None:
    """The note of a line, its newline included; None where the line is torn or damaged, or of another version."""
    version, _, rest = line.partition(b" ")
    checksum, _, text = rest.partition(b" ")
    if version != VERSION or not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    try:
        return _note.decode(base64.b64decode(text[:-1], validate=True))
    except (binascii.Error, msgspec.MsgspecError):
        return None


class Spool:
    """The files of one gateway, and of dead ones in the same directory."""

    def __init__(self, directory: Path, owner: str, max_bytes: int) -> None:
        self._directory = directory
        self._owner = owner
        self._max_bytes = max_bytes
        self._file: int | None = None
        self._size = 0  # Of the file that is appended to, up to its last whole line.
        self._lock: int | None = None
        self.bytes = 0  # In all files of ours.
        self.kept_free = 0  # Bytes that only what was promised room may fill.
        self.bad_lines = 0

    def open(self) -> None:
        """Make the directory and lock our files. Raises SpoolError where another live gateway of this name has them."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(self._path("lock"))
            if self._lock is not None:
                self.cut()  # What a process of this name left may end in the middle of a line.
        except OSError as error:
            raise SpoolError(f"The spool {self._directory} cannot be used: {_why(error)}.") from error
        if self._lock is None:
            raise SpoolError(f"Another gateway named {self._owner} uses the spool {self._directory}.")
        self.bytes = sum(path.stat().st_size for path in self._files(self._owner))

    def close(self) -> None:
        """Let whoever comes next have what is left; the lock goes with the last file."""
        self._close_file()
        if self._lock is not None:
            if not self._files(self._owner):
                self._path("lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    @property
    def full(self) -> bool:
        """Whether there is no room for one more line."""
        return self.bytes + self.kept_free + MAX_LINE_BYTES > self._max_bytes

    def append(self, notes: Iterable[Note], keep_free: int = 0) -> None:
        """Write these, with so many bytes left for others, and wait until the disk has them.

        Raises SpoolFull and other SpoolErrors; then none of them is there.
        """
        data = b"".join(to_line(note) for note in notes)
        if self.bytes + len(data) + keep_free > self._max_bytes:
            raise SpoolFull(self._full())
        try:
            self._write(data)
        except OSError as error:
            self._give_up()
            raise SpoolError(f"The spool cannot be written: {_why(error)}.") from error
        self._size += len(data)
        self.bytes += len(data)
        self.kept_free = keep_free

    def try_out(self) -> None:
        """See whether a line would be written. Raises SpoolFull and other SpoolErrors."""
        if self.full:
            raise SpoolFull(self._full())
        path = self._path("try")
        try:
            self._write(b"")  # Where the file itself is at fault.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, bytes(MAX_LINE_BYTES))
                os.fsync(handle)
            finally:
                os.close(handle)
                path.unlink(missing_ok=True)
        except OSError as error:
            raise SpoolError(f"The spool cannot be written: {_why(error)}.") from error

    def _full(self) -> str:
        return f"The spool is full: {self.bytes} of {self._max_bytes} bytes wait for Redis."

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._file).st_size
            _sync(self._directory)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)

    def _give_up(self) -> None:
        """Cut off what was half written, and go on in another file: nothing is appended to a torn line."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
        with contextlib.suppress(OSError):
            self.cut()

    def cut(self) -> None:
        """Close the file that is appended to, so that it can be merged; the next line begins another. Raises OSError."""
        self._close_file()
        current = self._path("log")
        if current.exists() and not current.stat().st_size:
            current.unlink()
        elif current.exists():
            numbers = [int(path.suffix[1:]) for path in self._files(self._owner) if path.suffix != ".log"]
            current.rename(f"{current}.{max(numbers, default=0) + 1}")

    def to_merge(self) -> list[Path]:
        """Our closed files, oldest first. Raises OSError."""
        return sorted((p for p in self._files(self._owner) if p.suffix != ".log"), key=lambda p: int(p.suffix[1:]))

    def dead_owners(self) -> list[str]:
        """Other gateways that have files here; whether they live is found by `take_over`. Raises OSError."""
        owners = {path.name.partition(".log")[0] for path in self._directory.glob("*.log*")}
        return sorted(owners - {self._owner})

    def take_over(self, owner: str) -> tuple[int, list[Path]] | None:
        """The lock and the files of a gateway that lives no more; None where it lives. Raises OSError."""
        lock = _locked(self._path("lock", owner))
        return None if lock is None else (lock, self._files(owner))

    def finish(self, owner: str, lock: int) -> None:
        """Everything of that dead gateway is merged: forget it. Raises OSError."""
        if not self._files(owner):
            self._path("lock", owner).unlink(missing_ok=True)
        os.close(lock)

    def read(self, path: Path, offset: int, most: int) -> Part:
        """Up to `most` lines from `offset` on. Raises OSError."""
        part = Part([], [], offset)
        with path.open("rb") as file:
            file.seek(offset)
            while len(part.notes) + len(part.bad) < most and (line := file.readline(MAX_LINE_BYTES)):
                note = from_line(line)
                part.bad.append(line) if note is None else part.notes.append(note)
            return part._replace(next_offset=file.tell())

    def set_aside(self, path: Path, lines: list[bytes]) -> None:
        """Keep lines that cannot be read for whoever wants to look. Raises OSError."""
        self.bad_lines += len(lines)
        owner = path.name.partition(".log")[0]
        with self._path("bad", owner).open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)

    def remove(self, path: Path) -> None:
        """It is merged. Raises OSError."""
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
    """Open and lock a file; None where somebody else has it locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _sync(directory: Path) -> None:
    """Make the names in a directory durable, too."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
