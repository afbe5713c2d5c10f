"""Where a run keeps its things: a temporary directory that is gone afterwards, or one that the user has named.

With it comes the leash: whatever is started from here on is killed when this process ends, in whatever way.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierlane.chaos.option_texts import TOOL
from tierlane.chaos.options import UsageError
from tierlane.settings.descriptions import PREFIX
from tierlane.up.data_dir import DataDir
from tierlane.up.log_lines import LogLines
from tierlane.up.orphan_guard import MARK_VARIABLE, REMOVABLE_PREFIX, Leash

LOG = "roles.log"
DATABASE = "postgres"


@dataclass(frozen=True)
class Home:
    """The directory, the leash over it, and the log of all roles."""

    data_dir: DataDir
    leash: Leash
    lines: LogLines

    @property
    def path(self) -> Path:
        """The directory."""
        return self.data_dir.path


@contextmanager
def home(keep: Path | None) -> Iterator[Home]:
    """Make the directory; afterwards it is removed, or at least the database in it. Raises UsageError."""
    _forget_settings()
    data_dir = DataDir(_made(keep) if keep else _temporary())
    os.environ[MARK_VARIABLE] = secrets.token_hex(16)  # Inherited by every process that is started from here on.
    leash = Leash(data_dir)
    if not keep:
        leash.remove_at_end(data_dir.path)
    try:
        with (data_dir.path / LOG).open("ab", buffering=0) as log:
            yield Home(data_dir, leash, LogLines(log, coloured=False))
    finally:
        leash.release()
        data_dir.release()
        shutil.rmtree(data_dir.path / DATABASE if keep else data_dir.path, ignore_errors=True)


def _forget_settings() -> None:
    """What is set for another stack must not reach this one."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix=REMOVABLE_PREFIX))
    _let_through(path)
    return path


def _made(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise UsageError(f"{TOOL.both_names('keep')}: {path} exists already; name a new directory.") from None
    except OSError as error:
        raise UsageError(f"{TOOL.both_names('keep')}: cannot make {path}: {error.strerror}.") from None
    _let_through(path)
    return path


def _let_through(path: Path) -> None:
    if os.geteuid() == 0:
        path.chmod(0o711)  # PostgreSQL is another user then, who must be able to pass through but not to list.
