"""The data directory of a local stack: who may use it now, and the small private files that are kept in it."""

import contextlib
import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import psutil

from tierlane.up.errors import StackError

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
