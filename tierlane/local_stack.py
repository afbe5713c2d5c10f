"""The local stack as default: what `tierlane up` runs here is what a command means, unless its URLs are set."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pydantic import SecretStr

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

STACK_FILE = "stack.json"


class LocalStack(msgspec.Struct, frozen=True):
    """What of the stack file a command needs to reach the stack."""

    redis_url: str
    database_url: str
    service_token: str
    http_url: str = ""


def find_local_stack(data_dir: Path) -> LocalStack | None:
    """The stack that runs in this data directory; None where there is none, or its file cannot be read by us."""
    try:
        return msgspec.json.decode((data_dir / STACK_FILE).read_bytes(), type=LocalStack)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def with_local_stack(settings: "Settings") -> "Settings":
    """The settings, with the local stack's addresses and token where neither URL is set.

    One URL that is set means another system: half of the local one beside it would mix the two.
    """
    if settings.redis_url or settings.database_url:
        return settings
    stack = find_local_stack(settings.data_dir)
    if stack is None:
        return settings
    token = settings.service_token.get_secret_value() or stack.service_token
    found = {"redis_url": stack.redis_url, "database_url": stack.database_url, "service_token": SecretStr(token)}
    return settings.model_copy(update=found)
