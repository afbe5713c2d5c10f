"""The peers: which package, how it is started, and with how many connections at most it is asked."""
# ruff: noqa: INP001 - a folder of scripts, not a package

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tierlane.embedded.process import find_redis

HERE = Path(__file__).parent
FEW = 512
"""Connections for those that answer more slowly the more there are; the others get what was asked for."""


class Place(NamedTuple):
    """What a peer may use: its own Python, an empty folder, and a port with the ones after it."""

    python: Path
    home: Path
    port: int


class Command(NamedTuple):
    """One process to start."""

    words: Sequence[str]
    copies: int = 1


class Peer(NamedTuple):
    """One system that is compared, in one of its setups.

    `system` is the folder of its scripts, `package` the pinned one whose version is shown; `window_ms`, where it is set,
    wins over what all are given.
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
        """Its scripts."""
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
        "MOSEC_CAPACITY": "8192",  # Its own 1,024 refuse what this load has in flight.
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
