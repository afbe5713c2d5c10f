"""The data directory of a local stack, its log output, and its port.

One process at a time may use the directory. The port of the gateways is reserved first: it can take minutes until a gateway
listens, and meanwhile the kernel could assign it to a process that binds any free port, such as a worker's endpoint.
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

from tierlane.connect import LOCK_FILE
from tierlane.settings.checks import is_token

NAME_WIDTH = 11  # "scheduler-1".
MAX_LINE_BYTES = 64 << 10  # A longer line is split, to limit the memory.
MAX_LAST_BYTES = 200  # Of the last line of a process, where it is repeated.
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
STACK = "tierlane"

CLEANUP_WAIT_S = 5.0  # After a SIGKILL, the orphan guard keeps the lock until all processes have ended.
POLL_S = 0.05


class LogLines:
    """Writes lines with the name of their process, from several threads. A closed stream is ignored."""

    def __init__(self, stream: BinaryIO, *, coloured: bool) -> None:
        self._stream = stream
        self._coloured = coloured
        self._lock = threading.Lock()
        self._prefixes: dict[str, bytes] = {}
        self._last: dict[str, bytes] = {}

    def say(self, message: str) -> None:
        """Write a message of `up`."""
        for line in message.splitlines() or [""]:
            self.write(STACK, line.encode())

    def raw(self, text: str) -> None:
        """Write text without a prefix."""
        self._emit(text.encode())

    def pump(self, name: str, source: BinaryIO) -> None:
        """Copy lines of `source` in a thread until it ends."""
        threading.Thread(target=self._copy, args=(name, source), name=f"log of {name}", daemon=True).start()

    def last(self, name: str) -> str:
        """The last line of a process that is not blank, cut off; "" if there is none."""
        return self._last.get(name, b"")[:MAX_LAST_BYTES].decode(errors="replace").strip()

    def write(self, name: str, line: bytes) -> None:
        if not line.isspace():
            self._last[name] = line
        with self._lock:
            if name not in self._prefixes:
                text = f"{name:<{NAME_WIDTH}} | "
                colour = COLOURS[len(self._prefixes) % len(COLOURS)]
                self._prefixes[name] = (f"\x1b[{colour}m{text}\x1b[0m" if self._coloured else text).encode()
        self._emit(self._prefixes[name] + line.rstrip(b"\r\n") + b"\n")

    def _copy(self, name: str, source: BinaryIO) -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                self.write(name, line)

    def _emit(self, data: bytes) -> None:
        with self._lock:
            try:
                self._stream.write(data)
                self._stream.flush()
            except (OSError, ValueError):
                return  # The reader of the output has ended; the stack continues.


def standard_output() -> LogLines:
    """Lines to standard output, coloured in a terminal unless NO_COLOR is set."""
    return LogLines(sys.stdout.buffer, coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


class StackError(Exception):
    """The local stack cannot start; the message contains the reason and what to do."""


class DataDir:
    """A locked data directory; its files are readable only by the owner."""

    def __init__(self, path: Path) -> None:
        """Create the directory if needed and lock it. Raises StackError when another stack uses it."""
        self.path = path.absolute()
        try:
            # As root, the user of PostgreSQL must be able to enter the directory, but not to list it.
            self.path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            self.lock_fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StackError(f"Cannot use the data directory {self.path}: {error.strerror}.") from error
        self._lock()

    def _lock(self) -> None:
        deadline = time.monotonic() + CLEANUP_WAIT_S
        while True:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                text = os.pread(self.lock_fd, 20, 0)
            holder = int(text) if text.isdigit() else None
            if holder is None or psutil.pid_exists(holder) or time.monotonic() > deadline:
                os.close(self.lock_fd)
                raise StackError(
                    f"Another `tierlane up` (pid {holder}) uses {self.path}: stop it, or choose another --data-dir."
                )
            time.sleep(POLL_S)
        os.ftruncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)

    def service_token(self) -> str:
        """The service token, created at the first start, and anew if its file was emptied or cut off."""
        path = self.path / "service-token"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if is_token(token := path.read_text().strip()):
                return token
        token = secrets.token_urlsafe(32)
        write_private(path, token + "\n")
        return token

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in the file `name`; empty if the file is missing or invalid."""
        with contextlib.suppress(OSError, ValueError):
            value = json.loads((self.path / name).read_text())
            if isinstance(value, dict):
                return value
        return {}

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write an object to the file `name` atomically, with mode 0600."""
        write_private(self.path / name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, with mode 0600."""
    building = path.with_name(path.name + ".new")
    building.unlink(missing_ok=True)
    descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    building.replace(path)


@contextmanager
def held_port(host: str, port: int, option: str = "--port") -> Iterator[int]:
    """Reserve a port, any free one for 0: in the block, only servers of this user with SO_REUSEPORT can listen on it.

    Raises StackError, which names the `option` to change, if the port is in use or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Bound without SO_REUSEPORT, so that this fails if another stack listens on it.
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Allow it despite closed connections.
            trial.bind(address)
            trial.listen(1)
            chosen = tuple(trial.getsockname())
        held = _held(family, chosen)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StackError(
                f"Port {port} is in use on {host}{_by(port)}: stop that process, or choose {option}."
            ) from error
        raise StackError(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
    with held:
        yield int(held.getsockname()[1])


def _by(port: int) -> str:
    """The processes that listen on the port, if that can be read."""
    with contextlib.suppress(psutil.Error, OSError):
        pids = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
        }
        found = [f"{psutil.Process(pid).name()}, pid {pid}" for pid in sorted(filter(None, pids))]
        return f" by {'; '.join(found)}" if found else ""
    return ""


def _held(family: int, address: tuple[object, ...]) -> socket.socket:
    """A bound socket that does not listen, so that gateways with SO_REUSEPORT get all connections."""
    try:
        return _bound(family, address, socket.SO_REUSEPORT)
    except OSError as error:
        # SO_REUSEPORT alone fails while there are closed connections of a server without it.
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
