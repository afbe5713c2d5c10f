"""A gateway put together: its parts and who knows whom. The only place that knows all of them; nothing runs here."""

import random
from dataclasses import replace

from gateway.api.account import AccountEndpoint, AccountParts, FindUsage
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.embeddings import EMBEDDINGS
from gateway.api.inference import INFERENCE, PLAIN, PREDICT
from gateway.api.models import Models
from gateway.auth.authenticator import Authenticator, Identities, TokenLookup
from gateway.auth.throttle import AuthThrottle
from gateway.catalog import CatalogView
from gateway.config import GatewayConfig
from gateway.http.errors import ErrorResponses
from gateway.http.request import BodyBudget
from gateway.http.router import DrainState, Router
from gateway.inference.events import RequestLog
from gateway.inference.fast_path import FastPath
from gateway.inference.handler import InferenceHandler
from gateway.inference.pipeline import InferencePipeline
from gateway.inference.traces import RequestTraces
from gateway.jobs.service import Jobs
from gateway.metrics.counters import Counters
from gateway.metrics.endpoint import Metrics
from gateway.openapi.html import Pages
from gateway.operations.action_requests import Connect
from gateway.operations.actions import Actions
from gateway.operations.dashboard import Dashboard
from gateway.operations.endpoints import FindStored, Internal, InternalParts
from gateway.operations.health_collector import HealthCollector
from gateway.operations.session import SessionAuth
from gateway.operations.snapshots import DashboardHistory, DashboardSnapshots
from gateway.pool import PoolParts, Shared
from gateway.pools import Pools
from gateway.standby_scheduler import Schedule
from scheduler.protocol.history import HistoryStore
from scheduler.protocol.limits import LimitState
from scheduler.protocol.pool_view import Unfinished

DOORS = {
    "/v1/inference": INFERENCE,
    "/v1/predict": PREDICT,
    "/api/inference": PLAIN,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": EMBEDDINGS,
}
"""Where customers ask, and how each place speaks."""


class GatewayParts(PoolParts):
    """What one gateway consists of: the parts of its own pool, and what stands before all pools."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: CatalogView,
        find_stored: FindStored | None = None,
        find_usage: FindUsage | None = None,
        tokens: TokenLookup | None = None,
        *,
        connect: Connect | None = None,
        traces: RequestTraces | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.drain_state = DrainState()
        self.identities = Identities(catalog, tokens)
        self.authenticator = self._authenticator(config.auth_failures)
        faults = ErrorResponses(random.random)
        counters = Counters()
        shared = Shared(
            catalog=catalog,
            drain_state=self.drain_state,
            authenticator=self.authenticator,
            faults=faults,
            bodies=BodyBudget(
                config.body_memory_bytes, config.customer_body_memory_bytes, config.key_body_memory_bytes
            ),
            counters=counters,
            request_log=RequestLog() if config.request_log else None,
            traces=traces,
            schedule=schedule,
        )
        super().__init__(config, shared)
        self.pools = Pools(
            catalog,
            self,
            lambda pool: PoolParts(of_pool(config, pool), shared),
            only_own=config.only_own,
            unfinished=Unfinished(self._client).pools,
            tasks=shared.tasks,
        )
        self.snapshots = self._snapshots()
        self.internal = self._internal(find_stored)
        self.me = self._me(find_usage)
        models = Models(self.authenticator, self.inference.customer_limits, self.pools.names, faults)
        session_auth = SessionAuth(config.service_token, self.authenticator)
        dashboard = Dashboard(session_auth, self.snapshots)
        self.actions = Actions(session_auth, connect, self.pools)
        self.metrics = Metrics(
            counters, config.metrics_dir, config.gateway_id, lambda: self.pools.all, lambda: self.pools.named
        )
        self._routes = build_routes(self.inference, self.internal, self.me, models, self.jobs, dashboard=dashboard)
        for method in ("GET", "HEAD"):
            self._routes.add(method, "/metrics", self.metrics)
        add_actions(self._routes, self.actions)
        self._fast_path = FastPath(self.inference, self.drain_state)

    def _authenticator(self, auth_failures: str) -> Authenticator:
        throttle = None if auth_failures == "off" else AuthThrottle(auth_failures)
        return Authenticator(self.identities, throttle)

    def _me(self, find_usage: FindUsage | None) -> AccountEndpoint:
        return AccountEndpoint(
            AccountParts(
                authenticator=self.authenticator,
                customer_limits=self.inference.customer_limits,
                read_limits=LimitState(self._client, self._keys).read,
                find_usage=find_usage,
            )
        )

    def _snapshots(self) -> DashboardSnapshots:
        catalog, gateway_id = self._shared.catalog, self.config.gateway_id
        judging = HealthCollector(catalog, self.pools, self.drain_state, self.identities)
        return DashboardSnapshots(
            judging, catalog, DashboardHistory(HistoryStore(self._client, self._keys, gateway_id)), gateway_id
        )

    def _internal(self, find_stored: FindStored | None) -> Internal:
        return Internal(
            InternalParts(
                service_token=self.config.service_token,
                catalog=self._shared.catalog,
                pools=self.pools,
                drain_state=self.drain_state,
                find_stored=find_stored,
                authenticator=self.authenticator,
                snapshots=self.snapshots,
            )
        )


def of_pool(config: GatewayConfig, pool: str) -> GatewayConfig:
    """The same gateway in another pool. Its spool has a folder of its own: what is in it belongs to that pool's Redis keys."""
    data_dir = None if config.data_dir is None else config.data_dir / "pools" / pool
    return replace(config, pool=pool, default_model=None, data_dir=data_dir)


def build_routes(
    inference: InferencePipeline,
    internal: Internal,
    me: AccountEndpoint,
    models: Models,
    jobs: Jobs,
    *,
    dashboard: Dashboard,
) -> Router:
    """Every address that this gateway answers. Each is described in gateway/openapi/endpoints.py: a test compares them."""
    routes = Router()
    pages = Pages()
    for path, api_format in DOORS.items():
        routes.add("POST", path, InferenceHandler(inference, api_format))
    routes.add("POST", "/v1/inference", jobs.submit)
    routes.add("DELETE", "/v1/result/{id}", jobs.result.delete)
    routes.add("GET", "/internal/health", internal.health)
    routes.add("GET", "/internal/requests/{id}", internal.request)
    routes.add("GET", "/internal/autoscale", internal.autoscale)
    routes.add("GET", "/internal/dashboard", dashboard.page)
    routes.add("POST", "/internal/dashboard/session", dashboard.log_in)
    routes.add("DELETE", "/internal/dashboard/session", dashboard.log_out)
    routes.add("GET", "/internal/dashboard/events", dashboard.events)
    for method in ("GET", "HEAD"):
        routes.add(method, "/internal/dashboard/assets/{id}", dashboard.asset)
        routes.add(method, "/v1/result/{id}", jobs.result.get)
        routes.add(method, "/v1/me", me)
        routes.add(method, "/v1/models", models.list)
        routes.add(method, "/v1/models/{id...}", models.one)
        routes.add(method, "/livez", internal.livez)
        routes.add(method, "/readyz", internal.readyz)
        routes.add(method, "/", pages.landing)
        routes.add(method, "/docs", pages.reference)
        routes.add(method, "/openapi.json", pages.description)
    return routes


def add_actions(routes: Router, actions: Actions) -> None:
    """What the page for on-call can do; described in gateway/openapi/endpoints.py."""
    cordons, letters = actions.cordons, actions.letters
    routes.add("POST", "/internal/dashboard/workers/cordon", cordons.cordon)
    routes.add("POST", "/internal/dashboard/workers/uncordon", cordons.uncordon)
    routes.add("GET", "/internal/dashboard/dead-letters", letters.groups)
    routes.add("POST", "/internal/dashboard/dead-letters/requeue", letters.requeue)
    routes.add("POST", "/internal/dashboard/dead-letters/purge", letters.purge)
