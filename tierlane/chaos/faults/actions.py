"""How each fault of the catalogue is done."""

from collections.abc import Mapping

from tierlane.chaos import postgres_faults, process_faults, proxy_faults, redis_faults
from tierlane.chaos.faults import hostile_client
from tierlane.chaos.faults.catalogue import KINDS
from tierlane.chaos.faults.target import Doing

DOING: Mapping[str, Doing] = {
    **{kind.name: process_faults.killed for kind in KINDS if kind.name.startswith("kill-")},
    **{kind.name: process_faults.stopped for kind in KINDS if kind.name.startswith("stop-")},
    **{kind.name: process_faults.ended for kind in KINDS if kind.name.startswith("term-")},
    "lose-workers": process_faults.all_lost,
    "hostile-client": hostile_client.hostile,
    "spool-full": process_faults.without_disk,
    "client-kill-normal": redis_faults.normal_clients_killed,
    "client-kill-pubsub": redis_faults.subscribers_killed,
    "flushall": redis_faults.flushed,
    "script-flush": redis_faults.scripts_flushed,
    "maxmemory": redis_faults.short_of_memory,
    "client-pause": redis_faults.paused,
    "redis-disk-full": redis_faults.without_disk,
    "clock-forward": redis_faults.clock_stepped(1),
    "clock-backward": redis_faults.clock_stepped(-1),
    "delay": proxy_faults.weather(),
    "drop-requests": proxy_faults.weather(drop_requests=True),
    "drop-replies": proxy_faults.weather(drop_replies=True),
    "refuse": proxy_faults.weather(refuse=True),
    "cut": proxy_faults.cut,
    "pg-terminate": postgres_faults.terminated,
    "pg-lock": postgres_faults.locked,
    "pg-disk-full": postgres_faults.without_disk,
}
