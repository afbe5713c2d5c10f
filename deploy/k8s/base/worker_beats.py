"""Exit code 0 while this worker's last heartbeat in Redis is younger than the seconds given, or Redis cannot be asked.

A worker serves gateways directly while Redis is away: to restart it then would make a loss out of an outage.
"""

import os
import sys

from redis import Redis, RedisError

from scheduler.redis_client.keys import Keys

SILENT = 1


def age_s(client: Redis, worker_id: str, pool: str) -> float:
    """Seconds since the last heartbeat by the clock of Redis; endless where there was none."""
    beat_ms = client.zscore(Keys(pool).gpus, worker_id)
    seconds, micros = client.time()
    return float("inf") if beat_ms is None else seconds + micros / 1e6 - beat_ms / 1000


def main() -> int:
    """Look once."""
    url = os.environ["TIERLANE_REDIS_URL"]
    if "+sentinel:" in url or "+cluster:" in url:
        return 0  # Only the roles know how to find the primary.
    try:
        with Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2, driver_info=None) as client:
            age = age_s(client, os.environ["TIERLANE_WORKER_ID"], os.environ.get("TIERLANE_POOL", "default"))
    except (RedisError, OSError):
        return 0
    return SILENT if age > float(sys.argv[1]) else 0


if __name__ == "__main__":
    sys.exit(main())
