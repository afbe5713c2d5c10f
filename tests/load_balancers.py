"""Load balancers with the files of deploy/proxies/, and gateways behind them that can be restarted."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from certificates import Certificates
from deploy_files import DEPLOY
from eventually import eventually
from stack import START_TIMEOUT_S, Stack, free_port

PROXIES = DEPLOY / "proxies"
STATE = "client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;"
"""Where nginx of a distribution would write into directories of root."""


class Gateway:
    """A gateway on a port of its own, with the default times unless `settings` change them."""

    def __init__(self, stack: Stack, home: Path, name: str, settings: Mapping[str, str]) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = home / f"{name}.log"
        self._environment = stack.role_environment() | {
            "TIERLANE_PORT": str(self.port),
            "TIERLANE_GRPC_PORT": str(self.grpc_port),
            "TIERLANE_DATA_DIR": str(home / name),
            "TIERLANE_PROCESS_NAME": name,
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = self._spawn()
        await eventually(lambda: answers(f"{self.url}/readyz"), "the gateway is ready", START_TIMEOUT_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "tierlane", "gateway"]
        with self._log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=self._environment)

    async def restart(self) -> None:
        """SIGTERM, the end of its drain, and a new start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await eventually(lambda: self._process.poll() is not None, "the gateway has ended", START_TIMEOUT_S)
        assert self._process.returncode == 0
        await self.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def answers(url: str) -> bool:
    """Whether the status is 200."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _nginx(home: Path) -> list[str]:
    user = "user root; " if os.geteuid() == 0 else ""
    return ["-p", str(home), "-c", str(home / "nginx.conf"), "-e", "stderr", "-g", f"{user}daemon off; pid nginx.pid;"]


def _envoy(home: Path) -> list[str]:
    # Two on one host need different ids.
    return ["-c", str(home / "envoy.yaml"), "--log-level", "warning", "--use-dynamic-base-id"]


PROGRAMS: dict[str, tuple[str, str, Callable[[Path], list[str]]]] = {
    "nginx": ("nginx", "nginx.conf", _nginx),
    "haproxy": ("haproxy", "haproxy.cfg", lambda home: ["-f", str(home / "haproxy.cfg")]),
    "envoy": ("envoy", "envoy.yaml", _envoy),
    "caddy": (
        "caddy",
        "Caddyfile",
        lambda home: ["run", "--adapter", "caddyfile", "--config", str(home / "Caddyfile")],
    ),
}
"""By name: the program, its file in deploy/proxies/, and its arguments."""


@contextmanager
def load_balancer(name: str, home: Path, gateways: tuple[Gateway, Gateway], tls: Certificates) -> Iterator[str]:
    """Run it before these gateways, with the addresses of the test in its file; the URL for customers."""
    program, file, arguments = PROGRAMS[name]
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    assert path is not None, f"{program} is not installed (on Debian: apt-get install {program})"
    (home / "tls.crt").write_bytes(tls.server.cert.read_bytes())
    (home / "tls.key").write_bytes(tls.server.key.read_bytes())
    (home / "haproxy.pem").write_bytes(tls.server.cert.read_bytes() + tls.server.key.read_bytes())
    port = free_port()
    text = (PROXIES / file).read_text().replace("/etc/tls/", f"{home}/").replace("\nhttp {", f"\nhttp {{ {STATE}")
    text = text.replace(":443", f":{port}").replace("listen 443", f"listen {port}").replace("e: 443", f"e: {port}")
    for number, gateway in enumerate(gateways, 1):
        for shown, real in ((8080, gateway.port), (8001, gateway.grpc_port)):
            for between in (":", ", port_value: "):
                text = text.replace(f"gateway-{number}{between}{shown}", f"127.0.0.1{between}{real}")
        text = text.replace("{port_value: 8080}", f"{{port_value: {gateway.port}}}", 1)
    if name == "caddy":
        text = f"{{\n\tadmin off\n\tstorage file_system {home}\n}}\n{text}"
    (home / file).write_text(text)
    with (home / f"{name}.log").open("wb") as output:
        process = subprocess.Popen([path, *arguments(home)], stdout=output, stderr=output, cwd=home)
    try:
        yield f"https://127.0.0.1:{port}"
        assert process.poll() is None, (home / f"{name}.log").read_text()
    finally:
        process.terminate()
        process.wait()
