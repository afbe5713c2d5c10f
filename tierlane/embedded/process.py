"""How PostgreSQL is run when we are root: it refuses root, so it gets the uid and gid 65534 and no more than it needs.

When that user cannot reach the binaries or the data (a checkout under /root, which is 0700), util-linux `setpriv`
leaves it one capability, to read past directory permissions. `no_setuid_fixup` belongs to it: PostgreSQL looks for
its own files with access(2), and without that bit the kernel answers access(2) as if the capability were absent.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierlane.embedded.errors import EmbeddedServerError

UNPRIVILEGED_ID = 65534  # "nobody" and "nogroup" nearly everywhere; needs no entry in the user database.
PROBE_TIMEOUT_S = 10.0
# Arguments: a file to read, two programs to run, then directories to enter. A redirection tests the reading, since
# `test -r` may ask access(2), which is not what opening a file asks.
PROBE_SCRIPT = ': < "$1" && "$2" --version && "$3" --version && shift 3 && for d; do cd "$d" || exit 1; done'


@dataclass(frozen=True)
class Identity:
    """Who a child process runs as: `uid` to drop to (None: no change), or a command `prefix` that drops by itself."""

    uid: int | None = None
    prefix: tuple[str, ...] = ()


def choose_identity(bin_dir: Path, readable: Path, directories: Sequence[Path]) -> Identity:
    """Return an identity that can run the programs of `bin_dir`, read `readable` and enter `directories`.

    As a normal user that is ourselves. As root each candidate is tried for real, because permissions, ACLs and
    mounts cannot be judged reliably from modes. Raises EmbeddedServerError when none works.
    """
    if os.geteuid() != 0:
        return Identity()
    for identity in _candidates():
        if _works(identity, bin_dir, readable, directories):
            return identity
    places = ", ".join(str(path) for path in (bin_dir, *directories))
    raise EmbeddedServerError(
        f"PostgreSQL refuses to run as root, and the unprivileged user {UNPRIVILEGED_ID} cannot reach {places}: "
        "run as a normal user, or put them under a directory that others may enter."
    )


def hand_over(path: Path) -> None:
    """Give `path` (one file or directory, not its contents) to the user that PostgreSQL will run as."""
    if os.geteuid() == 0:
        os.chown(path, UNPRIVILEGED_ID, UNPRIVILEGED_ID)


def _candidates() -> Iterator[Identity]:
    yield Identity(uid=UNPRIVILEGED_ID)
    if setpriv := shutil.which("setpriv"):
        # Some containers have only dac_override; it is also what lets a program without o+x be run.
        for capability in ("dac_read_search", "dac_override"):
            yield Identity(prefix=_setpriv_prefix(setpriv, capability))


def _setpriv_prefix(setpriv: str, capability: str) -> tuple[str, ...]:
    return (
        setpriv,
        f"--reuid={UNPRIVILEGED_ID}",
        f"--regid={UNPRIVILEGED_ID}",
        "--clear-groups",
        "--securebits=+no_setuid_fixup",
        f"--inh-caps=-all,+{capability}",
        f"--ambient-caps=+{capability}",
        f"--bounding-set=-all,+{capability}",
    )


def _works(identity: Identity, bin_dir: Path, readable: Path, directories: Sequence[Path]) -> bool:
    paths = [str(path) for path in (readable, bin_dir / "initdb", bin_dir / "postgres", *directories)]
    try:
        probe = subprocess.run(
            [*identity.prefix, "/bin/sh", "-c", PROBE_SCRIPT, "probe", *paths],
            user=identity.uid,
            group=identity.uid,
            extra_groups=None if identity.uid is None else [],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return probe.returncode == 0
