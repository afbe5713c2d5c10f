"""The home of a run: a temporary directory that is removed afterwards, or one that the user has named.

The orphan guard kills all started processes when this process ends.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierlane.settings.declaration import PREFIX
from tierlane_local.up.data_dir import DataDir, LogLines
from tierlane_local.up.orphan_guard import MARK_VARIABLE, REMOVABLE_PREFIX, OrphanGuard
from tierlane_tools.chaos.options import TOOL, ChaosUsageError

LOG = "roles.log"
DATABASE = "postgres"


@dataclass(frozen=True)
class Home:
    """The directory, the guard over it, and the log of all roles."""

    data_dir: DataDir
    guard: OrphanGuard
    lines: LogLines

    @property
    def path(self) -> Path:
        """The directory."""
        return self.data_dir.path


@contextmanager
def home(keep: Path | None) -> Iterator[Home]:
    """Create the directory; afterwards it is removed, or with --keep only its database. Raises ChaosUsageError."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # It may be a setting of another stack.
    if keep:
        path, option = keep, TOOL.both_names("keep")
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise ChaosUsageError(f"{option}: {path} exists already; name a new directory.") from None
        except OSError as error:
            raise ChaosUsageError(f"{option}: cannot make {path}: {error.strerror}.") from None
    else:
        path = Path(tempfile.mkdtemp(prefix=REMOVABLE_PREFIX))
    if os.geteuid() == 0:
        path.chmod(0o711)  # PostgreSQL runs as another user then, who must traverse the directory.
    data_dir = DataDir(path)
    os.environ[MARK_VARIABLE] = secrets.token_hex(16)  # Inherited by every process that is started from now on.
    guard = OrphanGuard(data_dir)
    if not keep:
        guard.remove_at_end(data_dir.path)
    try:
        with (data_dir.path / LOG).open("ab", buffering=0) as log:
            yield Home(data_dir, guard, LogLines(log, coloured=False))
    finally:
        guard.release()
        data_dir.release()
        shutil.rmtree(data_dir.path / DATABASE if keep else data_dir.path, ignore_errors=True)
