"""Where a server's Unix socket lives: a 0700 directory whose path is short enough for the operating system.

Directory permissions are the only lock on these sockets, so a directory that someone else owns is refused.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from tierlane.embedded.errors import EmbeddedServerError
from tierlane.embedded.process import UNPRIVILEGED_ID

MAX_SOCKET_PATH_BYTES = 103  # sun_path holds 104 bytes on macOS (108 on Linux), one of them the closing NUL.


def usable_socket_dir(wanted: Path, socket_name: str) -> Path:
    """Return `wanted`, or a short directory under the temp dir when `wanted/socket_name` is too long to bind.

    The short name is derived from the wanted path and the user, so that every process finds the same one.
    """
    absolute = wanted.absolute()
    if len(os.fsencode(absolute / socket_name)) <= MAX_SOCKET_PATH_BYTES:
        return absolute
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tierlane-{os.getuid()}-{digest}"


def prepare_socket_dir(directory: Path) -> None:
    """Create `directory` with mode 0700. Raises EmbeddedServerError when somebody else made it before us."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    # As root the directory may already have been handed to the user that PostgreSQL runs as.
    owners = {0, UNPRIVILEGED_ID} if os.geteuid() == 0 else {os.geteuid()}
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in owners:
        raise EmbeddedServerError(f"The socket directory {directory} belongs to somebody else; remove it.")
    directory.chmod(0o700)
