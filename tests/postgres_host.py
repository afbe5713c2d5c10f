"""A PostgreSQL on its own host, with TLS: `python -m postgres_host DIR CERT KEY SQL`, until SIGTERM.

The embedded server is built without TLS, so a TLS proxy forwards to its socket.
"""

import asyncio
import os
import signal
import ssl
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg

from tierlane_local.embedded.postgres import EmbeddedPostgres
from tls_front import tls_before_postgres

PORT = 5432
ACCESS = "local tierlane tierlane scram-sha-256\nlocal all root trust\n"


async def main(home: Path, cert: str, key: str, sql: str) -> None:
    """Serve with the users and databases that `sql` creates."""
    server = EmbeddedPostgres(home, home / "socket", ephemeral=True)
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await set_up(server, sql)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        folder = parse_qs(urlsplit(server.url).query)["host"][0]  # Another one if ours is too long for a socket.
        socket = Path(folder) / f".s.PGSQL.{PORT}"
        async with tls_before_postgres(socket, context, host="0.0.0.0", port=PORT):
            (home / "ready").touch()
            await stopped.wait()
            os._exit(0 if await stop(server) else 1)  # Without waiting for forwarded connections.
    finally:
        await server.stop()


async def set_up(server: EmbeddedPostgres, sql: str) -> None:
    """Run `sql` as a superuser, and require passwords from then on."""
    first = await asyncpg.connect(server.dsn_for("postgres"))
    await first.execute("CREATE ROLE root SUPERUSER LOGIN")
    await first.close()
    root = await asyncpg.connect(server.dsn_for("postgres").replace("tierlane@", "root@"))
    await root.execute("DROP DATABASE tierlane")
    await root.execute("ALTER ROLE tierlane RENAME TO first")
    for statement in filter(None, map(str.strip, sql.split(";"))):
        await root.execute(statement)
    (server.home / "pg_hba.conf").write_text(ACCESS)
    await root.execute("SELECT pg_reload_conf()")
    await root.close()


async def stop(server: EmbeddedPostgres) -> bool:
    await server.stop()
    return not server.alive


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:5]))
