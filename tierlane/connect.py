"""How verbs reach PostgreSQL: the configured address, else that of the local stack which `tierlane up` runs here.

Each uses one short connection, whose faults are one sentence.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from pydantic import SecretStr

from ledger.admin.transaction import LOCK_TIMEOUT, Blocked, naming_holder
from ledger.postgres import AWAY, Connection, closing, connect, place_of, reason
from scheduler.errors import TierlaneError
from tierlane.settings.model import Settings, SettingsError

STACK_FILE = "stack.json"
LOCK_FILE = "lock"
"""It has the PID of `tierlane up`, from its start on."""

CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_MS = 30_000


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


def no_local_stack(data_dir: Path, otherwise: str) -> str:
    """The clause for a command that finds no stack in this directory, with what to do: wait if one is starting."""
    with suppress(OSError, ValueError):
        pid = int((data_dir / LOCK_FILE).read_text())
        os.kill(pid, 0)  # It is empty after the end of a stack, and may be left by one that was killed.
        return f"a stack is starting in {data_dir} (pid {pid}); wait until `tierlane up` says that it is ready"
    return f"no local stack runs in {data_dir}; {otherwise}"


def with_local_stack(settings: Settings) -> Settings:
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


class UsageError(Exception):
    """The verb cannot be meant like that; the message is one sentence."""


class VerbError(TierlaneError):
    """The verb cannot be carried out; the message is one sentence."""


class NeedsServersError(VerbError):
    """The verb needs PostgreSQL or Redis, and was called with --url."""


def reachable(settings: Settings) -> Settings:
    """The settings with the local stack's addresses where none is set. Raises SettingsError without a database."""
    found = with_local_stack(settings)
    if not found.database_url:
        raise SettingsError(
            "TIERLANE_DATABASE_URL: is not set, and "
            + no_local_stack(settings.data_dir, "set it, start `tierlane up`, or name the stack's --data-dir")
        )
    return found


@asynccontextmanager
async def administering(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """One connection, called `name` in pg_stat_activity, that waits for locks for a bounded time. Raises AWAY and Blocked."""
    async with (
        _connected(settings, name) as connection,
        naming_holder(connection, lambda: _connected(settings, name)),
    ):
        yield connection


@asynccontextmanager
async def database(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """As `administering`. Raises VerbError where PostgreSQL does not serve it."""
    if not settings.database_url:
        raise NeedsServersError("PostgreSQL has no address.")
    try:
        async with administering(settings, name) as connection:
            yield connection
    except Blocked as error:
        raise VerbError(str(error)) from error
    except AWAY as error:
        raise VerbError(f"PostgreSQL at {place_of(settings.session_url)} cannot be used: {reason(error)}.") from error


@asynccontextmanager
async def _connected(settings: Settings, name: str) -> AsyncIterator[Connection]:
    connection = await connect(
        settings.session_url,
        name=name,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        settings=LOCK_TIMEOUT,
    )
    async with closing(connection):
        yield connection
