"""The embedded PostgreSQL server: one cluster on a Unix socket, no TCP port, run as an unprivileged user under root.

Whoever can enter the 0700 socket directory is trusted. Killed processes lose no commit; a machine that fails does when the
server is ephemeral.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from tierlane.child_process import POLL_S
from tierlane.embedded.process import (
    POSTGRES_SERVER,
    EmbeddedServerError,
    ProcessUser,
    ServerProcess,
    choose_identity,
    find_postgres,
    hand_over,
    prepare_socket_dir,
    read_pid,
    usable_socket_dir,
)

NAME = "tierlane"  # The superuser and the database.
SOCKET_LOCK = ".s.PGSQL.5432.lock"  # The longest path that the server makes in the socket directory.
START_TIMEOUT_S = 30.0  # Recovery after a crash replays the write-ahead log.
INITDB_TIMEOUT_S = 60.0
STOP_GRACE_S = 4.0

PORT = 5432  # Only part of the socket's name; fixed, because a PGPORT in the environment would change it.

SETTINGS = {
    "port": str(PORT),
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",  # Compiling costs more than our short statements.
    "log_min_messages": "warning",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    # Nobody replicates from a local stack. But "minimal" writes no log of a sequence in the transaction that makes it, nor
    # of its next 32 numbers: after a crash before the next checkpoint it would give them again.
    "wal_level": "replica",
}
# Only what a loss of the whole machine needs. A killed process loses nothing that the kernel was given: the log of each
# commit, and each page in whole, since a kill may cut the writing of a page in two.
EPHEMERAL_SETTINGS = {"fsync": "off"}


class EmbeddedPostgres:
    """A cluster for one data directory: `<data_dir>/postgres/` and, by default, `<data_dir>/postgres.log`."""

    def __init__(
        self,
        data_dir: Path,
        socket_dir: Path,
        *,
        ephemeral: bool = False,
        log: Path | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        """`ephemeral`: no fsync, a crash of the machine may lose the data. `extra_args`: for `postgres`, appended, so they win."""
        self.home = data_dir.absolute() / "postgres"
        self._socket_dir = usable_socket_dir(socket_dir, SOCKET_LOCK)
        self._ephemeral = ephemeral
        self._extra_args = tuple(extra_args)
        self._process = ServerProcess("Embedded PostgreSQL", self.home, log or data_dir.absolute() / "postgres.log")
        self.url = self.url_for(NAME)
        self.dsn = self.dsn_for(NAME)

    def url_for(self, database: str) -> str:
        """The SQLAlchemy URL (asyncpg driver) of one database of this cluster."""
        return f"postgresql+asyncpg://{NAME}@/{database}?host={self._socket_dir}&port={PORT}"

    def dsn_for(self, database: str) -> str:
        """The same for `asyncpg.connect`."""
        return f"postgresql://{NAME}@/{database}?host={self._socket_dir}&port={PORT}"

    @property
    def pid(self) -> int:
        """Process id of the postmaster. Raises EmbeddedServerError before the first start."""
        if not self._process.pid:
            raise EmbeddedServerError("The server has not been started.")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the postmaster runs now."""
        return self._process.alive

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run, None while it runs."""
        return self._process.returncode

    async def start(self) -> None:
        """Create the cluster when there is none, start it, wait until it answers, create the database `tierlane`.

        Raises EmbeddedServerError with the log's last lines.
        """
        if self.alive:
            return
        bin_dir = find_postgres()
        major = _major_version(bin_dir)
        identity = self._prepare_directories(bin_dir)
        await self._clear_leftover()
        if not (self.home / "PG_VERSION").exists():
            await asyncio.to_thread(self._create_cluster, bin_dir, major, identity)
        self._check_version(major)
        self._process.run([str(bin_dir / "postgres"), *self._arguments(major)], identity)
        try:
            await self._ready()
        except BaseException:
            self._process.kill()
            raise

    def kill(self) -> None:
        """Kill the server at once. Harmless when it does not run."""
        self._process.kill()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Fast shutdown (open transactions are rolled back); everything is killed after `grace_s` seconds."""
        await self._process.stop(signal.SIGINT, grace_s)

    def _prepare_directories(self, bin_dir: Path) -> ProcessUser:
        # Under root the server is another user, who must be able to enter the data directory but not to list it.
        self.home.parent.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        prepare_socket_dir(self._socket_dir)
        hand_over(self._socket_dir)
        return choose_identity(bin_dir, _catalog_file(bin_dir), [self.home.parent, self._socket_dir])

    async def _clear_leftover(self) -> None:
        pid_file = self.home / "postmaster.pid"
        pid = read_pid(pid_file)
        await self._process.clear_leftover(pid, [POSTGRES_SERVER])
        # The server refuses to start when the number in a stale file belongs to any process now: to another one of
        # its user, or to its own zombie where nobody reaps orphans (containers without an init process).
        pid_file.unlink(missing_ok=True)
        lock = self._socket_dir / SOCKET_LOCK
        if _owner_of_lock(lock) == str(self.home):
            lock.unlink()

    def _create_cluster(self, bin_dir: Path, major: int, identity: ProcessUser) -> None:
        # Made beside its place and renamed, so that an interrupted initdb never looks like a cluster.
        building = self.home.with_suffix(".new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(mode=0o700)
        hand_over(building)
        self._run_initdb(bin_dir, building, major, identity)
        if self.home.exists():
            self.home.rmdir()
        building.rename(self.home)

    def _run_initdb(self, bin_dir: Path, directory: Path, major: int, identity: ProcessUser) -> None:
        options = ["--encoding=UTF8", "--locale=C", "--auth=trust", f"--username={NAME}", "--no-instructions"]
        if major >= 17:  # The same collation on every system, whatever locales it has installed.
            options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if self._ephemeral:
            options.append("--no-sync")
        try:
            made = subprocess.run(
                [*identity.prefix, str(bin_dir / "initdb"), f"--pgdata={directory}", *options],
                user=identity.uid,
                group=identity.uid,
                extra_groups=None if identity.uid is None else [],
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=INITDB_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedServerError(f"initdb could not be run: {error}") from error
        if made.returncode != 0:
            raise EmbeddedServerError(f"initdb failed:\n{made.stderr.decode(errors='replace').strip()}")

    def _check_version(self, major: int) -> None:
        found = (self.home / "PG_VERSION").read_text().strip()
        if found != str(major):
            raise EmbeddedServerError(
                f"{self.home} was made by PostgreSQL {found}, but the server found is version {major}: "
                "use another data directory, or remove this one if its data is not needed."
            )

    def _arguments(self, major: int) -> list[str]:
        settings = SETTINGS | {"unix_socket_directories": str(self._socket_dir)}
        if self._ephemeral:
            settings |= EPHEMERAL_SETTINGS
        if major >= 18:
            settings["io_method"] = "sync"  # Three helper processes less.
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return ["-D", str(self.home), *options, *self._extra_args]

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self._ensure_database():
            if not self.alive:
                raise self._process.failure("ended while starting")
            if time.monotonic() > deadline:
                raise self._process.failure(f"did not answer within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _ensure_database(self) -> bool:
        """Create our database when it is missing; False while the server does not accept connections yet."""
        try:
            connection = await asyncpg.connect(self.dsn_for("postgres"), timeout=5)
        except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            return False
        try:
            known = await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", NAME)
            if not known:
                await connection.execute(f"CREATE DATABASE {NAME}")
        finally:
            await connection.close()
        return True


def _owner_of_lock(lock: Path) -> str | None:
    """The data directory that the lock file of a socket names, in its second line."""
    try:
        return lock.read_text().splitlines()[1]
    except (OSError, IndexError):
        return None


def _major_version(bin_dir: Path) -> int:
    shown = subprocess.run([str(bin_dir / "postgres"), "--version"], capture_output=True, timeout=10, check=False)
    found = re.search(rb"\(PostgreSQL\) (\d+)", shown.stdout)
    if not found:
        reason = shown.stderr.decode(errors="replace").strip()
        raise EmbeddedServerError(f"{bin_dir / 'postgres'} does not run on this machine: {reason}")
    return int(found[1])


def _catalog_file(bin_dir: Path) -> Path:
    """A file that initdb must read: in the wheels beside `bin`, in Debian's packages under /usr/share."""
    for share in (bin_dir.parent / "share", bin_dir.parent / "share" / "postgresql"):
        if (share / "postgres.bki").exists():
            return share / "postgres.bki"
    return bin_dir / "postgres"
