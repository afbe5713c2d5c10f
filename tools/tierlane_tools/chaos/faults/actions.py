"""The injection of each fault of the catalogue, by name."""

from collections.abc import Mapping

from tierlane_tools.chaos.faults import cluster, engine, hostile_client
from tierlane_tools.chaos.faults.catalogue import KINDS
from tierlane_tools.chaos.faults.network_faults import cut, network
from tierlane_tools.chaos.faults.postgres_faults import locked, postgres_without_disk, terminated
from tierlane_tools.chaos.faults.process_faults import all_lost, ended, gateway_without_disk, killed, stopped
from tierlane_tools.chaos.faults.redis_faults import (
    clock_stepped,
    flushed,
    paused,
    redis_command,
    redis_without_disk,
    short_of_memory,
)
from tierlane_tools.chaos.faults.target import FaultAction

ACTIONS: Mapping[str, FaultAction] = {
    **{kind.name: killed for kind in KINDS if kind.name.startswith("kill-")},
    **{kind.name: stopped for kind in KINDS if kind.name.startswith("stop-")},
    **{kind.name: ended for kind in KINDS if kind.name.startswith("term-")},
    "lose-workers": all_lost,
    "hostile-client": hostile_client.hostile,
    "spool-full": gateway_without_disk,
    "client-kill-normal": redis_command("{} connections", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
    "client-kill-pubsub": redis_command("{} connections", "CLIENT", "KILL", "TYPE", "pubsub"),
    "flushall": flushed,
    "script-flush": redis_command("", "SCRIPT", "FLUSH"),
    "maxmemory": short_of_memory,
    "client-pause": paused,
    "redis-disk-full": redis_without_disk,
    "clock-forward": clock_stepped(1),
    "clock-backward": clock_stepped(-1),
    "failover": cluster.failed_over,
    "migrate-slot": cluster.slot_moved,
    "delay": network(),
    "drop-requests": network(drop_requests=True),
    "drop-replies": network(drop_replies=True),
    "refuse": network(refuse=True),
    "cut": cut,
    "engine-reset": engine.reset,
    "engine-resets": engine.resets,
    "engine-busy": engine.busy,
    "pg-terminate": terminated,
    "pg-lock": locked,
    "pg-disk-full": postgres_without_disk,
}
