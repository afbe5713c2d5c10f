"""The life of a role's process: signals, start checks, log output, traces.

A refusal to start is one sentence and exit code 1. Start is refused on a Redis that can lose work, or a database that
is not migrated. A server that is unavailable is no reason to refuse: the roles go on meanwhile. Log lines are JSON for
machines, colours for people; never a key, an input or an output; repeated lines are counted.
"""

import asyncio
import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import structlog
import uvloop

from scheduler.errors import RedisUnavailable, StartError, TierlaneError
from scheduler.failpoints import arm
from scheduler.redis_client.connections import check_server, command_client, server_url
from scheduler.redis_client.distance import too_far
from scheduler.redis_client.keys import DEFAULT_CELL, cell_of
from scheduler.tracing import Spans
from tierlane.roles.log_repeats import Render, RepeatFilter
from tierlane.settings.model import Settings

REFUSED = 1
FAILPOINTS_VARIABLE = "TIERLANE_TEST_FAILPOINTS"

log = structlog.get_logger("process")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

NOT_INSTALLED = (
    "TIERLANE_TRACES_ENDPOINT is set, but OpenTelemetry is not installed: pip install 'tierlane[tracing]', or unset it."
)


def run_role(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop until it returns its exit code; it handles SIGTERM and SIGINT itself."""
    if directory := os.environ.get(FAILPOINTS_VARIABLE):
        arm(Path(directory))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except TierlaneError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def with_cluster(settings: Settings, *, any_cell: bool = False) -> Settings:
    """The settings with the scheme of a cluster in `redis_url` if the server runs in cluster mode.

    Raises StartError, also if the URL names another cell than the default one, unless `any_cell`.
    """
    if not any_cell and (cell := cell_of(settings.redis_url)) != DEFAULT_CELL:
        raise StartError(f"TIERLANE_REDIS_URL must be that of the default cell: omit #{cell}. All cells are served.")
    return settings.model_copy(update={"redis_url": await server_url(settings.redis_url)})


async def check_redis(redis_url: str) -> None:
    """Refuse a Redis that is too old or may evict queued work. Raises StartError."""
    client = command_client(redis_url)
    try:
        if problem := too_far(await check_server(client)):
            log.warning("redis_far", error=problem)
    except RedisUnavailable as error:
        log.warning("redis_away", error=str(error))
    finally:
        await client.aclose()


async def check_database(database_url: str) -> None:
    """Refuse an old schema, and a pooler in transaction mode. Raises StartError."""
    # Workers never need asyncpg.
    from ledger.postgres import SharedSession, reason  # noqa: PLC0415
    from ledger.revision import current_revision, head_revision, is_behind  # noqa: PLC0415

    try:
        revision = await current_revision(database_url)
    except SharedSession as error:
        raise StartError(f"{reason(error)}.") from error
    except StartError as error:
        log.warning("database_away", error=str(error))
        return
    if is_behind(revision):
        raise StartError(
            f"The database is at revision {revision or 'none'}, not {head_revision()}: run `tierlane migrate`."
        )


def configure_logs(log_format: str, log_level: str, role: str, name: str) -> None:
    """Every line of this process says its role and its name, and goes to standard output."""
    render: Render = (
        structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
        if log_format == "console"
        else structlog.processors.JSONRenderer(serializer=lambda line, **_: orjson.dumps(line, default=str).decode())
    )
    repeats = RepeatFilter(render)
    atexit.register(repeats.close)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            repeats,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, name=name)


@contextmanager
def spans_of(settings: Settings, role: str, name: str) -> Iterator[Spans | None]:
    """The receiver of spans while the block runs; None if tracing is off.

    At the end of the block what is left is sent, within a bound. Raises StartError where the packages are missing.
    """
    if not settings.traces_endpoint:
        yield None
        return
    try:
        from tierlane.roles.tracing import OtlpSpans  # noqa: PLC0415 - takes 150 ms and 20 MB
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("opentelemetry", "google", "requests")):
            raise
        raise StartError(NOT_INSTALLED) from None
    spans = OtlpSpans(settings.traces_endpoint, role, name)
    try:
        yield spans
    finally:
        spans.close()
