"""The user of PostgreSQL, which does not run as root: there it gets the uid and gid 65534.

When that user cannot access the binaries or the data (a checkout under /root, which is 0700), `setpriv` of util-linux keeps
one capability, to read past directory permissions. This requires `no_setuid_fixup`: PostgreSQL checks its files with
access(2), which otherwise ignores the capability.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierlane_local.embedded.error import EmbeddedServerError

UNPRIVILEGED_ID = 65534  # "nobody" and "nogroup" on most systems; needs no entry in the user database.
PROBE_TIMEOUT_S = 10.0
# Arguments: a file to read, two programs to run, then directories to enter. A redirection tests whether the file can be
# read, because `test -r` may use access(2), which applies other rules than open(2).
PROBE_SCRIPT = ': < "$1" && "$2" --version && "$3" --version && shift 3 && for d; do cd "$d" || exit 1; done'


@dataclass(frozen=True)
class ProcessUser:
    """The user of a child process: `uid` (None: unchanged), or a command `prefix` that changes the user."""

    uid: int | None = None
    prefix: tuple[str, ...] = ()

    def run(self, argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run a command as this user. Raises OSError and subprocess.SubprocessError."""
        return subprocess.run(
            [*self.prefix, *argv],
            user=self.uid,
            group=self.uid,
            extra_groups=None if self.uid is None else [],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )


def choose_user(bin_dir: Path, readable: Path, directories: Sequence[Path]) -> ProcessUser:
    """A user that can run the programs in `bin_dir`, read the file `readable` and enter `directories`.

    Without root it is the current user. As root, each candidate is tested with a command, because file modes do not show
    ACLs and mount options. Raises EmbeddedServerError when none works.
    """
    if os.geteuid() != 0:
        return ProcessUser()
    paths = [str(path) for path in (readable, bin_dir / "initdb", bin_dir / "postgres", *directories)]
    for user in _candidates():
        with suppress(OSError, subprocess.SubprocessError):
            if user.run(["/bin/sh", "-c", PROBE_SCRIPT, "probe", *paths], PROBE_TIMEOUT_S).returncode == 0:
                return user
    places = ", ".join(str(path) for path in (bin_dir, *directories))
    raise EmbeddedServerError(
        f"PostgreSQL refuses to run as root, and the unprivileged user {UNPRIVILEGED_ID} cannot reach {places}: "
        "run as a normal user, or put them under a directory that others may enter."
    )


def change_owner(path: Path) -> None:
    """As root, make the unprivileged user the owner of `path`, but not of its contents."""
    if os.geteuid() == 0:
        os.chown(path, UNPRIVILEGED_ID, UNPRIVILEGED_ID)


def _candidates() -> Iterator[ProcessUser]:
    yield ProcessUser(uid=UNPRIVILEGED_ID)
    if setpriv := shutil.which("setpriv"):
        # Some containers have only dac_override. It also allows to run a program without o+x.
        for capability in ("dac_read_search", "dac_override"):
            options = (
                f"--reuid={UNPRIVILEGED_ID}",
                f"--regid={UNPRIVILEGED_ID}",
                "--clear-groups",
                "--securebits=+no_setuid_fixup",
                f"--inh-caps=-all,+{capability}",
                f"--ambient-caps=+{capability}",
                f"--bounding-set=-all,+{capability}",
            )
            yield ProcessUser(prefix=(setpriv, *options))
