"""`python -m scheduler`: generate the tables of docs/errors.md and docs/redis-keys.md."""

from ratelimit.__main__ import Pages, table, update
from scheduler.errors import HTTP
from scheduler.redis_client.keys import KEYS

_RETRY = {None: "", True: "yes", False: "no"}


def pages() -> Pages:
    """Error codes and Redis keys."""
    codes = ((f"`{code}`", str(row.status), row.cause, row.action, _RETRY[row.retry]) for code, row in HTTP.items())
    keys = ((f"`{key.name}`", key.type, key.content, key.owner, key.ttl or "none") for key in KEYS)
    return {
        "errors.md": {"error codes": table(("Code", "Status", "Cause", "What to do", "Retry"), codes)},
        "redis-keys.md": {"keys": table(("Key", "Type", "Content", "Created by", "TTL"), keys)},
    }


if __name__ == "__main__":
    update(pages())
