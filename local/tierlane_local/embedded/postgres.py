"""The embedded PostgreSQL server: one cluster on a Unix socket, without a TCP port. Root starts it as an unprivileged user.

Every user that can enter the 0700 socket directory is trusted. A killed server loses no commit; a crash of the machine can
lose commits of an ephemeral server.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from tierlane_local.embedded.binaries import POSTGRES_SERVER, find_postgres
from tierlane_local.embedded.error import EmbeddedServerError
from tierlane_local.embedded.process import EmbeddedServer
from tierlane_local.embedded.process_user import ProcessUser, change_owner, choose_user
from tierlane_local.embedded.socket_dir import prepare_socket_dir, usable_socket_dir

NAME = "tierlane"  # The superuser and the database.
SOCKET_LOCK = ".s.PGSQL.5432.lock"  # The longest path that the server creates in the socket directory.
INITDB_TIMEOUT_S = 60.0
STOP_GRACE_S = 4.0

PORT = 5432  # Part of the name of the socket; set explicitly, because PGPORT in the environment would change it.

SETTINGS = {
    "port": str(PORT),
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",  # Compiling takes longer than the short statements.
    "log_min_messages": "warning",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    # A local stack has no replicas. But with "minimal", the transaction that creates a sequence logs neither the sequence
    # nor its next 32 values: after a crash before the next checkpoint, they would be returned again.
    "wal_level": "replica",
}
# Only protection against a crash of the machine is given up. The kernel keeps the writes of a killed process; full page
# writes stay on, because a kill can interrupt the write of a page.
EPHEMERAL_SETTINGS = {"fsync": "off"}


class EmbeddedPostgres(EmbeddedServer):
    """The PostgreSQL cluster of a data directory."""

    STOP_SIGNAL = signal.SIGINT  # Fast shutdown: open transactions are rolled back.

    def __init__(
        self,
        data_dir: Path,
        socket_dir: Path,
        *,
        ephemeral: bool = False,
        log: Path | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        """`ephemeral`: no fsync, so a crash of the machine may lose data. `extra_args` are appended, so they take precedence."""
        super().__init__("postgres", "Embedded PostgreSQL", data_dir, log)
        self._socket_dir = usable_socket_dir(socket_dir, SOCKET_LOCK)
        self._ephemeral = ephemeral
        self._extra_args = tuple(extra_args)
        self.url = self.url_for(NAME)
        self.dsn = self.dsn_for(NAME)

    def url_for(self, database: str) -> str:
        """The SQLAlchemy URL of a database, for the asyncpg driver."""
        return f"postgresql+asyncpg://{NAME}@/{database}?host={self._socket_dir}&port={PORT}"

    def dsn_for(self, database: str) -> str:
        """The URL of a database for `asyncpg.connect`."""
        return f"postgresql://{NAME}@/{database}?host={self._socket_dir}&port={PORT}"

    async def start(self) -> None:
        """Create the cluster if there is none, start it, and create the database `tierlane`. Raises EmbeddedServerError."""
        if self.alive:
            return
        bin_dir = find_postgres()
        major = _major_version(bin_dir)
        # As root, the unprivileged user of the server must be able to enter the data directory, but not to list it.
        self.home.parent.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        prepare_socket_dir(self._socket_dir)
        change_owner(self._socket_dir)
        user = choose_user(bin_dir, _catalog_file(bin_dir), [self.home.parent, self._socket_dir])
        pid_file = self.home / "postmaster.pid"
        await self._end_leftover(pid_file, [POSTGRES_SERVER])
        # PostgreSQL does not start while the pid in a stale file belongs to any process: another one of the user, or
        # its own zombie in a container without an init process.
        pid_file.unlink(missing_ok=True)
        lock = self._socket_dir / SOCKET_LOCK
        with contextlib.suppress(OSError, IndexError):
            if lock.read_text().splitlines()[1] == str(self.home):  # The second line is the data directory.
                lock.unlink()
        if not (self.home / "PG_VERSION").exists():
            await asyncio.to_thread(self._create_cluster, bin_dir, major, user)
        found = (self.home / "PG_VERSION").read_text().strip()
        if found != str(major):
            raise EmbeddedServerError(
                f"{self.home} was created by PostgreSQL {found}, but the installed server is version {major}: "
                "use another data directory, or remove this one if its data is not needed."
            )
        settings = SETTINGS | {"unix_socket_directories": str(self._socket_dir)}
        settings |= EPHEMERAL_SETTINGS if self._ephemeral else {}
        if major >= 18:
            settings["io_method"] = "sync"  # Saves three helper processes.
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._run([str(bin_dir / "postgres"), "-D", str(self.home), *options, *self._extra_args], user)
        await self._wait_ready()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Shut down; after `grace_s` seconds, kill all processes of the server."""
        await super().stop(grace_s)

    def _create_cluster(self, bin_dir: Path, major: int, user: ProcessUser) -> None:
        # Created under another name and renamed, so that an interrupted initdb never looks like a cluster.
        building = self.home.with_suffix(".new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(mode=0o700)
        change_owner(building)
        options = ["--encoding=UTF8", "--locale=C", "--auth=trust", f"--username={NAME}", "--no-instructions"]
        if major >= 17:  # The same collation on every system, independent of the installed locales.
            options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if self._ephemeral:
            options.append("--no-sync")
        try:
            done = user.run([str(bin_dir / "initdb"), f"--pgdata={building}", *options], INITDB_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise EmbeddedServerError(f"initdb could not be run: {error}") from error
        if done.returncode != 0:
            raise EmbeddedServerError(f"initdb failed:\n{done.stderr.decode(errors='replace').strip()}")
        if self.home.exists():
            self.home.rmdir()
        building.rename(self.home)

    async def _responds(self) -> bool:
        """Create the database if it does not exist; False while the server does not accept connections yet."""
        try:
            connection = await asyncpg.connect(self.dsn_for("postgres"), timeout=5)
        except (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            return False
        try:
            exists = await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", NAME)
            if not exists:
                await connection.execute(f"CREATE DATABASE {NAME}")
        finally:
            await connection.close()
        return True


def _major_version(bin_dir: Path) -> int:
    shown = subprocess.run([str(bin_dir / "postgres"), "--version"], capture_output=True, timeout=10, check=False)
    found = re.search(rb"\(PostgreSQL\) (\d+)", shown.stdout)
    if not found:
        reason = shown.stderr.decode(errors="replace").strip()
        raise EmbeddedServerError(f"{bin_dir / 'postgres'} does not run on this machine: {reason}")
    return int(found[1])


def _catalog_file(bin_dir: Path) -> Path:
    """A file that initdb reads, to test access to it."""
    for share in (bin_dir.parent / "share", bin_dir.parent / "share" / "postgresql"):
        if (share / "postgres.bki").exists():
            return share / "postgres.bki"
    return bin_dir / "postgres"
