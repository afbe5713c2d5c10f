"""The data directory of a local stack, its log output, its port and its one error.

One process may use the directory; the small private files are kept in it. Output is whole lines on one stream, each
with the name of its process. The gateways' port is reserved before anything is started: minutes may pass until a
gateway listens, and meanwhile the kernel would give it to whoever asks for any free one, a worker's direct endpoint for
example.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

NAME_WIDTH = 11  # "scheduler-1".
MAX_LINE_BYTES = 64 << 10  # A longer line is cut into several, so that no process can fill our memory.
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
STACK = "tierlane"


class LogLines:
    """Writes prefixed lines from several threads; a stream that is gone is ignored, so that nobody ever blocks."""

    def __init__(self, stream: BinaryIO, *, coloured: bool) -> None:
        """`stream`: where lines go; each is written whole."""
        self._stream = stream
        self._coloured = coloured
        self._lock = threading.Lock()
        self._prefixes: dict[str, bytes] = {}

    def say(self, message: str) -> None:
        """Write a message of the stack itself."""
        for line in message.splitlines() or [""]:
            self.write(STACK, line.encode())

    def raw(self, text: str) -> None:
        """Write text without any prefix."""
        self._emit(text.encode())

    def pump(self, name: str, source: BinaryIO) -> None:
        """Copy lines of `source` until it ends, in a thread of its own."""
        threading.Thread(target=self._copy, args=(name, source), name=f"log of {name}", daemon=True).start()

    def write(self, name: str, line: bytes) -> None:
        """Write one line of `name`."""
        self._emit(self._prefix(name) + line.rstrip(b"\r\n") + b"\n")

    def _copy(self, name: str, source: BinaryIO) -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                self.write(name, line)

    def _prefix(self, name: str) -> bytes:
        with self._lock:
            if name not in self._prefixes:
                text = f"{name:<{NAME_WIDTH}} | "
                colour = COLOURS[len(self._prefixes) % len(COLOURS)]
                self._prefixes[name] = (f"\x1b[{colour}m{text}\x1b[0m" if self._coloured else text).encode()
            return self._prefixes[name]

    def _emit(self, data: bytes) -> None:
        with self._lock:
            try:
                self._stream.write(data)
                self._stream.flush()
            except (OSError, ValueError):
                return  # The reader of our output has gone; the stack goes on.


def standard_output() -> LogLines:
    """Lines for standard output: coloured when it is a terminal and NO_COLOR is not set."""
    return LogLines(sys.stdout.buffer, coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


class StackError(Exception):
    """The local stack cannot start; the message says why and what to do."""


CLEANUP_WAIT_S = 5.0  # After a SIGKILL the leash holds the lock until it has cleared everything away.
POLL_S = 0.05


class DataDir:
    """A data directory that is locked by us; the files in it are readable by its owner only."""

    def __init__(self, path: Path) -> None:
        """Create the directory if needed and lock it. Raises StackError when another stack uses it."""
        self.path = path.absolute()
        try:
            # Under root, PostgreSQL is another user, who must be able to pass through but not to list.
            self.path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            self.lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StackError(f"Cannot use the data directory {self.path}: {error.strerror}.") from error
        self._lock()

    def _lock(self) -> None:
        deadline = time.monotonic() + CLEANUP_WAIT_S
        while not _try_lock(self.lock_fd):
            holder = _holder(self.lock_fd)
            if holder is None or psutil.pid_exists(holder) or time.monotonic() > deadline:
                os.close(self.lock_fd)
                raise StackError(
                    f"Another `tierlane up` (pid {holder}) uses {self.path}: stop it, or choose another --data-dir."
                )
            time.sleep(POLL_S)
        os.ftruncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let the next stack have the directory."""
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)

    def service_token(self) -> str:
        """Return the token that was made at the first start."""
        path = self.path / "service-token"
        with contextlib.suppress(OSError):
            if token := path.read_text().strip():
                return token
        token = secrets.token_urlsafe(32)
        write_private(path, token + "\n")
        return token

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object kept under `name`; an absent or broken file counts as empty."""
        with contextlib.suppress(OSError, ValueError):
            value = json.loads((self.path / name).read_text())
            if isinstance(value, dict):
                return value
        return {}

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Keep an object under `name`, mode 0600, replaced at once as a whole."""
        write_private(self.path / name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove a kept file if there is one."""
        (self.path / name).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, mode 0600; a reader sees the old text or the new, never a part."""
    building = path.with_name(path.name + ".new")
    building.unlink(missing_ok=True)
    descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    building.replace(path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int | None:
    text = os.pread(descriptor, 20, 0)
    return int(text) if text.isdigit() else None


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port to use, a free one for 0; while it is held, only servers of this user that share it (`SO_REUSEPORT`) get it.

    Raises StackError when the port is taken or may not be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = _held(family, _tried(family, address))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StackError(
                f"Port {port} is in use on {host}{_by(port)}: stop what listens there, or choose --port."
            ) from error
        raise StackError(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
    with held:
        yield int(held.getsockname()[1])


def _by(port: int) -> str:
    """Who listens, as far as we may know."""
    with contextlib.suppress(psutil.Error, OSError):
        pids = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
        }
        found = [f"{psutil.Process(pid).name()}, pid {pid}" for pid in sorted(filter(None, pids))]
        return f" by {'; '.join(found)}" if found else ""
    return ""


def _tried(family: int, address: tuple[object, ...]) -> tuple[object, ...]:
    """The address, with its port. Gateways share theirs, so the trial must not: it has to fail when somebody else listens,
    of another stack too.
    """
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Closed connections are no obstacle.
        trial.bind(address)
        trial.listen(1)
        return tuple(trial.getsockname())


def _held(family: int, address: tuple[object, ...]) -> socket.socket:
    """A socket that never listens: no connection comes to it, and who shares the port listens beside it."""
    try:
        return _bound(family, address, socket.SO_REUSEPORT)
    except OSError as error:
        # Closed connections of a server that did not share its port are in the way of one that only shares.
        if error.errno != errno.EADDRINUSE:
            raise
        return _bound(family, address, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bound(family: int, address: tuple[object, ...], *options: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held
