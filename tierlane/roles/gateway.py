"""The gateway's process: the HTTP edge over a catalog that follows PostgreSQL."""

import contextlib
import functools
import gc
import resource
from collections.abc import AsyncIterator

import structlog
from uuid_utils import uuid7

from gateway.app import run_gateway
from gateway.auth.authenticator import TokenLookup
from gateway.config import BatchConfig, GatewayConfig, GrpcConfig, JobConfig, JwtConfig, ResponseStoreConfig
from gateway.inference.traces import RequestTraces
from ledger.admin.transaction import LOCK_TIMEOUT, naming_holder
from ledger.audit.queries import RequestRow, Usage, find_request, find_usage
from ledger.catalog.follower import Catalog
from ledger.postgres import Connection, closing, connect
from scheduler.protocol.admission import ReplayLimits
from tierlane.roles.process import check_database, configure_logs, run_role, spans_of, with_cluster
from tierlane.roles.stand_in import StandIn
from tierlane.settings.model import Settings

LOOK_TIMEOUT_MS = 500
"""For the one look at the audit that `GET /internal/requests/{id}` or `GET /v1/me` may need."""

DESK_CONNECT_TIMEOUT_S = 1.0
DESK_STATEMENT_TIMEOUT_MS = 5000

SPARE_FILES = 64
"""Beside the connections: servers, logs, the event loop."""

DAY_S = 86_400.0
SILENT_MS = 500
MISSED_PASSES = 3
"""Without a pass of a scheduler for so long, gateways do its work. It is more than one pass and one call to a slow Redis take."""

COLLECT_AFTER = (50_000, 20, 20)
"""Objects. Requests make no rings, and thousands of them wait: to look them over every 700 objects finds nothing."""

log = structlog.get_logger("gateway")


def run(settings: Settings) -> int:
    """Run until SIGTERM; returns the exit code."""
    name = settings.own_name
    configure_logs(settings.log_format, settings.log_level, "gateway", name)
    return run_role(lambda: _serve(settings, name))


def gateway_config(settings: Settings) -> GatewayConfig:
    """Plain values for the gateway. Its id is new with every start, so that no old answer meets a new connection."""
    return settings.config_of(
        GatewayConfig,
        gateway_id=f"{settings.own_name}-{uuid7().hex}",
        only_own=settings.serve_pools == "own",
        direct=settings.direct_mode == "on",
        metrics_dir=settings.metrics_dir or settings.data_dir / "metrics",
        request_log=settings.request_log == "on",
        cors_origins=settings.cors_origin_list,
        trusted_proxies=settings.proxy_networks,
        total_ms=settings.total_request_ms,
        header_timeout_s=settings.header_timeout_ms / 1000,
        body_timeout_s=settings.body_timeout_ms / 1000,
        idle_timeout_s=settings.idle_timeout_ms / 1000,
        customer_connections=max(1, round(settings.max_connections * settings.customer_connection_share)),
        drain_timeout_s=settings.drain_ms / 1000,
        scale=settings.scale_rules,
        replays=settings.config_of(ReplayLimits, "idempotency_"),
        jobs=settings.config_of(
            JobConfig,
            "callback_",
            database_url=settings.statement_url,
            session_url=settings.session_url,
            total_ms=settings.job_deadline_ms,
            kept_ms=settings.job_result_ms,
            callback_hosts=settings.callback_host_list,
            callback_secret=settings.callback_key,
            alert_url=settings.alert_url,
        ),
        grpc=settings.config_of(GrpcConfig, "grpc_") if settings.grpc_port else None,
        responses=ResponseStoreConfig(
            database_url=settings.statement_url,
            count=settings.stored_responses,
            bytes=settings.stored_response_bytes,
            kept_s=settings.stored_response_days * DAY_S,
        ),
        batches=BatchConfig(
            database_url=settings.statement_url,
            window=settings.batch_lines_in_progress,
            max_file_bytes=settings.batch_file_bytes,
            max_lines=settings.batch_file_lines,
            max_open=settings.open_batches,
            max_stored_bytes=settings.stored_file_bytes,
            kept_s=settings.stored_file_days * DAY_S,
        ),
        schedulers_expected=settings.schedulers > 0,
        silent_ms=max(SILENT_MS, MISSED_PASSES * settings.reap_ms),
    )


def raise_file_limit(wanted: int) -> None:
    """Allow as many open files as the system lets us, since each connection is one.

    At the soft limit, often 1024, new connections would be closed without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS says "infinity" and refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < wanted + SPARE_FILES:
        log.warning(
            "few_files",
            allowed=allowed,
            wanted=wanted + SPARE_FILES,
            effect=f"The limit of open files allows about {max(0, allowed - SPARE_FILES)} of {wanted} connections.",
            action="Raise `ulimit -n`, or LimitNOFILE in the systemd unit; or lower TIERLANE_MAX_CONNECTIONS.",
        )


async def _serve(settings: Settings, name: str) -> int:
    raise_file_limit(settings.max_connections)
    settings = await with_cluster(settings)
    await check_database(settings.session_url)
    catalog = Catalog(settings.session_url)
    with spans_of(settings, "gateway", name) as spans:
        traces: RequestTraces | None = None
        if spans is not None:
            trusts = settings.traces_trust_callers == "on"
            traces = RequestTraces(spans, settings.traces_sample, trust_callers=trusts)
        await catalog.start()
        gc.collect()
        gc.freeze()  # What is here stays: looking it over again would stop every answer for 40 ms now and then.
        gc.set_threshold(*COLLECT_AFTER)
        try:
            await run_gateway(
                gateway_config(settings),
                catalog,
                find_stored=functools.partial(_find, settings),
                find_usage=functools.partial(_usage, settings),
                tokens=tokens_of(settings, catalog),
                connect=functools.partial(_transaction, settings),
                traces=traces,
                schedule=StandIn(settings, catalog).run,
            )
        finally:
            await catalog.stop()
    return 0


async def _find(settings: Settings, request_id: str) -> RequestRow | None:
    async with _look(settings) as connection:
        return await find_request(connection, request_id)


async def _usage(settings: Settings, customer_id: str) -> Usage:
    async with _look(settings) as connection:
        return await find_usage(connection, customer_id)


@contextlib.asynccontextmanager
async def _transaction(settings: Settings) -> AsyncIterator[Connection]:
    """One connection for an action of the page for on-call, which may be about thousands of dead letters."""
    async with _at_desk(settings) as connection, naming_holder(connection, lambda: _at_desk(settings)):
        yield connection


@contextlib.asynccontextmanager
async def _at_desk(settings: Settings) -> AsyncIterator[Connection]:
    connection = await connect(
        settings.session_url,
        name="tierlane-dashboard",
        connect_timeout_s=DESK_CONNECT_TIMEOUT_S,
        statement_timeout_ms=DESK_STATEMENT_TIMEOUT_MS,
        settings=LOCK_TIMEOUT,
    )
    async with closing(connection):
        yield connection


@contextlib.asynccontextmanager
async def _look(settings: Settings) -> AsyncIterator[Connection]:
    """One short connection a look: people ask rarely, and an idle pool would be one more thing that can hang."""
    connection = await connect(
        settings.statement_url,
        name="tierlane-gateway",
        connect_timeout_s=LOOK_TIMEOUT_MS / 1000,
        statement_timeout_ms=LOOK_TIMEOUT_MS,
    )
    try:
        yield connection
    finally:
        await connection.close(timeout=LOOK_TIMEOUT_MS / 1000)


def tokens_of(settings: Settings, catalog: Catalog) -> TokenLookup | None:
    """The second way in; None where no JWKS is named. Raises StartError for what would let wrong tokens in."""
    if not settings.jwt_jwks:
        return None
    from gateway.auth.jwt_customers import JwtIdentities  # noqa: PLC0415 - brings cryptography: 80 ms and 15 MB

    return JwtIdentities(catalog, jwt_config(settings, settings.jwt_jwks))


def jwt_config(settings: Settings, jwks: str) -> JwtConfig:
    """Which tokens are accepted. Raises StartError."""
    algorithms = tuple(name.strip() for name in settings.jwt_algorithms.split(",") if name.strip())
    return settings.config_of(JwtConfig, "jwt_", jwks=jwks, algorithms=algorithms)
