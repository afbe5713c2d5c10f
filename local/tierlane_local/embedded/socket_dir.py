"""The directory of a server's socket: mode 0700, and its path is short enough for the operating system.

A directory of another user is rejected, because permissions are the only protection of the socket.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from tierlane_local.embedded.error import EmbeddedServerError
from tierlane_local.embedded.process_user import UNPRIVILEGED_ID

MAX_SOCKET_PATH_BYTES = 103  # sun_path holds 104 bytes on macOS (108 on Linux), one of them the closing NUL.


def usable_socket_dir(wanted: Path, socket_name: str) -> Path:
    """Return `wanted`, or a short path in the temporary directory when `wanted/socket_name` is too long for a socket.

    The short path depends only on `wanted` and the user, so that every process gets the same one.
    """
    absolute = wanted.absolute()
    if len(os.fsencode(absolute / socket_name)) <= MAX_SOCKET_PATH_BYTES:
        return absolute
    digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"tierlane-{os.getuid()}-{digest}"


def prepare_socket_dir(directory: Path) -> None:
    """Create `directory` with mode 0700. Raises EmbeddedServerError when another user owns it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    # As root, an earlier start may have made the unprivileged user its owner.
    owners = {0, UNPRIVILEGED_ID} if os.geteuid() == 0 else {os.geteuid()}
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in owners:
        raise EmbeddedServerError(f"The socket directory {directory} belongs to another user; remove it.")
    directory.chmod(0o700)
