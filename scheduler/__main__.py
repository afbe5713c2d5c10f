"""`python -m scheduler`: generate the error codes of docs/errors.md and the keys of docs/redis-keys.md."""

from ratelimit.__main__ import Pages, update
from scheduler.errors import HTTP
from scheduler.redis_client.keys import KEYS

_RETRY = {None: "", True: " (`x-should-retry: true`)", False: " (`x-should-retry: false`)"}


def pages() -> Pages:
    """Error codes, each with a heading to link to, and Redis keys."""
    codes = (
        f"\n### {code}\n\n{row.status}{_RETRY[row.retry]}. {row.cause}\n\n{row.action}\n" for code, row in HTTP.items()
    )
    keys = (f"* `{key.name}` ({'; '.join(filter(None, key[1:2] + key[3:]))}): {key.content}\n" for key in KEYS)
    return {
        "errors.md": {"error codes": "".join(codes)},
        "redis-keys.md": {"keys": "".join(keys)},
    }


if __name__ == "__main__":
    update(pages())
