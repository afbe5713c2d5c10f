"""A Redis primary with logins, its replica and Sentinels with logins, on request with TLS: real servers on loopback."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import RedisError

from certificates import Certificates
from eventually import eventually
from scheduler.redis_client.sentinel import answer_of
from stack import free_port

SERVICE = "primary"
DOWN_AFTER_MS = 1000
DATA, WATCH, PEER = "data%2F+1", "watch&2", "peer-3"
"""Passwords of users of Redis, of the Sentinels, and between the Sentinels. The first is percent-encoded."""

_REDIS_USERS = """
user default off
user tierlane on >data/+1 ~* &* +@all
user replica on >replica +psync +replconf +ping
user sentinel on >guard allchannels +multi +slaveof +ping +exec +subscribe +config|rewrite +role +publish +info +client|setname +client|kill +script|kill
masteruser replica
masterauth replica
"""
_SENTINEL_USERS = f"""
user default off
user tierlane on >{WATCH} -@all +sentinel|master
user peer on >{PEER} ~* &* +@all
sentinel sentinel-user peer
sentinel sentinel-pass {PEER}
"""


class GuardedRedis:
    """The servers. Without `made`: no TLS, and one password for all Sentinels (`requirepass`); with it: TLS, and users."""

    def __init__(
        self, home: Path, binary: Path, made: Certificates | None = None, *, replicas: int = 1, sentinels: int = 3
    ) -> None:
        self._home, self._binary, self._made = home, binary, made
        self.ports = [free_port() for _ in range(1 + replicas)]
        self.sentinel_ports = [free_port() for _ in range(sentinels)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The URL with all that it needs."""
        scheme, login = "redis", "sentinel_password=watch%262"
        if self._made is not None:
            own = self._made.client
            files = f"ssl_ca_certs={self._made.authority.cert}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
            scheme, login = "rediss", f"sentinel_user=tierlane&{login}&sentinel_tls=on&{files}"
        nodes = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"{scheme}+sentinel://tierlane:{DATA}@{nodes}/{SERVICE}?{login}"

    async def start(self) -> None:
        """Until each Sentinel knows the replicas and the other Sentinels."""
        primary = self.ports[0]
        for port in self.ports:
            replica = [] if port == primary else [f"replicaof 127.0.0.1 {primary}"]
            lines = [*self._listening(port), 'save ""', "repl-diskless-sync-delay 0", _REDIS_USERS, *replica]
            self._run(port, lines)
        for port in self.sentinel_ports:
            users = "requirepass " + WATCH if self._made is None else _SENTINEL_USERS
            watching = [
                f"sentinel monitor {SERVICE} 127.0.0.1 {primary} {len(self.sentinel_ports) // 2 + 1}",
                f"sentinel auth-user {SERVICE} sentinel",
                f"sentinel auth-pass {SERVICE} guard",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
            ]
            self._run(port, [*self._listening(port), users, *watching], "--sentinel")
        for port in self.sentinel_ports:
            await eventually(self._complete(port), f"the Sentinel at {port} knows the others", 30.0)

    def kill_primary(self) -> None:
        """Send SIGKILL to the first primary."""
        self._processes[0].kill()

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _listening(self, port: int) -> list[str]:
        if self._made is None:
            return ["bind 127.0.0.1", f"port {port}"]
        server, authority = self._made.server, self._made.authority.cert
        files = [f"tls-cert-file {server.cert}", f"tls-key-file {server.key}", f"tls-ca-cert-file {authority}"]
        return ["bind 127.0.0.1", "port 0", f"tls-port {port}", "tls-replication yes", *files]

    def _run(self, port: int, lines: list[str], *options: str) -> None:
        home = self._home / str(port)
        home.mkdir()
        (home / "conf").write_text("\n".join([*lines, f"dir {home}", ""]))
        with (home / "log").open("wb") as log:
            command = [str(self._binary), str(home / "conf"), *options]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _complete(self, port: int) -> Callable[[], Any]:
        async def complete() -> bool:
            connection: Connection = Connection(host="127.0.0.1", port=port, password=WATCH)
            if self._made is not None:
                files = {"ssl_certfile": str(self._made.client.cert), "ssl_keyfile": str(self._made.client.key)}
                authority = str(self._made.authority.cert)
                connection = SSLConnection(
                    host="127.0.0.1", port=port, username="peer", password=PEER, ssl_ca_certs=authority, **files
                )
            try:
                state = await answer_of(connection, "SENTINEL", "MASTER", SERVICE)
            except (RedisError, OSError):
                return False
            known = state if isinstance(state, dict) else dict(zip(state[::2], state[1::2], strict=True))
            found = int(known[b"num-slaves"]), int(known[b"num-other-sentinels"])
            return known[b"flags"] == b"master" and found == (len(self.ports) - 1, len(self.sentinel_ports) - 1)

        return complete
