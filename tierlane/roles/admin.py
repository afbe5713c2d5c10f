"""The process of the admin API. It needs PostgreSQL only."""

import structlog

from gateway.admin_api.document import DOCUMENTS
from gateway.admin_api.oidc_provider import OidcConfig
from gateway.admin_api.routes import ROUTES
from gateway.admin_api.server import AdminConfig, AdminServer
from scheduler.errors import StartError
from tierlane.connect import administering
from tierlane.roles.process import check_database, configure_logs, run_role, stop_on_signals
from tierlane.settings.checks import parse_group_roles
from tierlane.settings.model import Settings

APPLICATION = "tierlane-admin-api"
DEFAULT_PORT = 8081

log = structlog.get_logger("admin")


def run(settings: Settings) -> int:
    """Run until SIGTERM; returns the exit code."""
    configure_logs(settings.log_format, settings.log_level, "admin", settings.own_name)
    return run_role(lambda: _serve(settings))


async def _serve(settings: Settings) -> int:
    stop = stop_on_signals()
    await check_database(settings.session_url)
    config = AdminConfig(
        host=settings.admin_host,
        port=DEFAULT_PORT if settings.admin_port is None else settings.admin_port,
        auth_failures=settings.auth_failures,
        trusted_proxies=settings.proxy_networks,
        oidc=oidc_config(settings),
        callback_secret=settings.callback_key,
    )
    server = AdminServer(config, lambda: administering(settings, APPLICATION), ROUTES, DOCUMENTS)
    try:
        async with server.listening() as port:
            log.info("admin API ready", host=config.host, port=port)
            await stop.wait()
    except OSError as error:
        raise StartError(f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.") from error
    return 0


def oidc_config(settings: Settings) -> OidcConfig | None:
    """The sign-in through a provider; None where no issuer is set."""
    if not settings.admin_oidc_issuer:
        return None
    roles = parse_group_roles(settings.admin_oidc_roles)
    return settings.config_of(OidcConfig, prefix="admin_oidc_", roles=roles)
