"""The peers: package, commands, connections, and the virtual environment of each, made from its requirements.txt."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tierlane_local.embedded.binaries import find_redis

HERE = Path(__file__).parent
FEW = 512
"""The most connections of peers that slow down with more."""
INSTALL_S = 900.0
STAMP = ".requirements"


class Place(NamedTuple):
    """The Python of a peer, an empty folder, and the first of its ports."""

    python: Path
    home: Path
    port: int


class Command(NamedTuple):
    """A command to start, and the number of its processes."""

    words: Sequence[str]
    copies: int = 1


class Peer(NamedTuple):
    """One compared system in one setup.

    `system` is the folder of its scripts, `package` the pinned package whose version is shown; `window_ms` overrides the
    window of the job.
    """

    name: str
    system: str
    title: str
    package: str
    setup: str
    commands: Callable[[Place], Sequence[Command]]
    environment: Callable[[Place], dict[str, str]]
    most_connections: int | None = None
    window_ms: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of its scripts."""
        return HERE / self.system

    @property
    def requirements(self) -> Path:
        """Its pinned packages."""
        return self.folder / "requirements.txt"


def _server(place: Place) -> Sequence[Command]:
    return [Command([str(place.python), "server.py"])]


def _nothing(_: Place) -> dict[str, str]:
    return {}


def _mosec(place: Place) -> dict[str, str]:
    return {
        "MOSEC_PORT": str(place.port),
        "MOSEC_ADDRESS": "127.0.0.1",
        "MOSEC_PATH": str(place.home / "mosec"),
        "MOSEC_CAPACITY": "8192",  # The default of 1,024 rejects the open requests of this load.
        "MOSEC_TIMEOUT": "10000",
        "MOSEC_LOG_LEVEL": "warning",
    }


def _ray(place: Place) -> dict[str, str]:
    haproxy = place.home / "haproxy"
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(place.port + 3),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(place.port + 4),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(place.port + 14),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(place.port + 1),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(place.port + 2),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
    }


def _redis_socket(place: Place) -> Path:
    return place.home / "redis.sock"


def _saq(place: Place) -> Sequence[Command]:
    redis = [str(find_redis()), "--port", "0", "--unixsocket", str(_redis_socket(place)), "--save", ""]
    python = str(place.python)
    return [
        Command([*redis, "--appendonly", "no", "--dir", str(place.home)]),
        Command([python, "worker.py"], copies=2),
        Command([python, "server.py"], copies=2),
    ]


PEERS = (
    Peer("mosec", "mosec", "Mosec", "mosec", "34 workers", _server, _mosec),
    Peer("mosec_10ms", "mosec", "Mosec", "mosec", "34 workers, its own window of 10 ms", _server, _mosec, window_ms=10),
    Peer("litserve", "litserve", "LitServe", "litserve", "4 workers, 2 API servers", _server, _nothing),
    Peer("ray_serve", "ray_serve", "Ray Serve", "ray", "HAProxy, 2 replicas", _server, _ray, FEW),
    Peer(
        "fastapi_batcher",
        "fastapi_batcher",
        "FastAPI + micro-batcher",
        "fastapi",
        "2 processes",
        _server,
        _nothing,
        FEW,
    ),
    Peer(
        "saq",
        "saq",
        "SAQ over Redis",
        "saq",
        "2 aiohttp fronts, 2 workers",
        _saq,
        lambda place: {"PEER_REDIS_URL": f"unix://{_redis_socket(place)}"},
        FEW,
    ),
)


class InstallError(Exception):
    """A peer cannot be installed; the message is the last line of pip."""


def prepare(folder: Path, requirements: Path, base: str = sys.executable) -> Path:
    """The Python of an environment of `base` with these requirements, made again when they change. Raises InstallError."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = requirements.read_text("utf-8")
    if not (stamp.exists() and stamp.read_text("utf-8") == wanted):
        made = subprocess.run([base, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True, check=False)
        if made.returncode:
            raise InstallError(f"{Path(base).name} makes no environment: {(made.stderr + made.stdout).strip()[:200]}")
        _install(python, requirements)
        stamp.write_text(wanted, "utf-8")
    return python.absolute()


def _install(python: Path, requirements: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise InstallError(f"cannot be installed: {(done.stderr.strip().splitlines() or ['no output of pip'])[-1]}")


def pinned(requirements: Path, package: str) -> str:
    """The pinned version of a package."""
    for line in requirements.read_text("utf-8").splitlines():
        name, _, version = line.partition("==")
        if name.lower() == package:
            return version
    raise SystemExit(f"{requirements} does not pin {package}.")
