"""PgBouncer before an embedded PostgreSQL, for tests that are marked `surroundings`."""

import asyncio
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tierlane_local.embedded.binaries import find_postgres
from tierlane_local.embedded.postgres import EmbeddedPostgres
from tierlane_local.embedded.process import EmbeddedServer
from tierlane_local.embedded.process_user import choose_user

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
HOST = "127.0.0.1"
CONFIG = """
[databases]
* = host={server} port={server_port}
[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = {mode}
"""
"""Everything else has PgBouncer's defaults, also the startup parameters that it rejects."""


class PgBouncer(EmbeddedServer):
    """A pooler in front of `server`. `mode`: session or transaction."""

    def __init__(self, home: Path, server: EmbeddedPostgres, mode: str) -> None:
        super().__init__("pgbouncer", "PgBouncer", home, None)
        self._server = server
        self.mode = mode
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]

    def url_for(self, database: str) -> str:
        """The URL of a database behind the pooler, as people write it."""
        return f"postgres://tierlane@{HOST}:{self.port}/{database}"

    async def start(self) -> None:
        if PROGRAM is None:
            pytest.fail("These tests need PgBouncer; on Debian: apt-get install pgbouncer")
        self.home.mkdir(parents=True, exist_ok=True)
        where = parse_qs(urlsplit(self._server.url).query)
        users, config = self.home / "users.txt", self.home / "pgbouncer.ini"
        users.write_text('"tierlane" ""\n')
        config.write_text(
            CONFIG.format(
                server=where["host"][0],
                server_port=where["port"][0],
                host=HOST,
                port=self.port,
                users=users,
                mode=self.mode,
            )
        )
        for path in (self.home, users, config):
            path.chmod(0o755)
        # It refuses to run as root, as PostgreSQL does, and has to enter the directory of the server's socket.
        user = choose_user(find_postgres(), config, [self.home, Path(where["host"][0])])
        self._run([PROGRAM, str(config)], user, {"PATH": os.environ["PATH"]})
        await self._wait_ready()

    async def _responds(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(HOST, self.port)
        except OSError:
            return False
        writer.close()
        return True
