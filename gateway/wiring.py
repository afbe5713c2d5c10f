"""The wiring of a gateway: builds its parts and connects them. Nothing runs here."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gateway.account.handlers import AccountHandlers
from gateway.account.page import AccountPage
from gateway.account.store import AccountStore
from gateway.account.usage import UsageReports, usage_reader
from gateway.api.account import AccountEndpoint, AccountHome, AccountParts, FindUsage
from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.embeddings import EMBEDDINGS
from gateway.api.inference import INFERENCE, PLAIN, PREDICT
from gateway.api.models import Models
from gateway.api.open_inference.endpoints import INFER, OpenInference
from gateway.api.open_inference.error_form import TENSOR_FORM
from gateway.api.open_inference.metadata import OpenInferenceParts
from gateway.auth.authenticator import Authenticator, TokenLookup
from gateway.auth.throttle import AuthThrottle
from gateway.batch_api.handlers import BatchHandlers
from gateway.batch_api.service import BatchService
from gateway.cells import Homes
from gateway.config import GatewayConfig
from gateway.http.body.budget import BodyBudget
from gateway.http.error_responses import ErrorResponses
from gateway.http.router import DrainState, Router
from gateway.inference.entry import Entry
from gateway.inference.events import RequestLog
from gateway.inference.fast_path import FastPath
from gateway.inference.handler import InferenceHandler
from gateway.inference.traces import RequestTraces
from gateway.jobs.results import JobResultHandler
from gateway.jobs.submit import JobSubmitHandler
from gateway.limits.auxiliary import AuxiliaryLimits
from gateway.limits.gpu_time import tier_gpu_time
from gateway.metrics.counters import Counters
from gateway.metrics.endpoint import Metrics, MetricsSources
from gateway.metrics.gauges import PoolFigures
from gateway.openapi.html import Pages
from gateway.operations.actions import Actions
from gateway.operations.audited_transaction import AuditedTransaction, Connect
from gateway.operations.dashboard.history import DashboardHistory
from gateway.operations.dashboard.page import Dashboard
from gateway.operations.dashboard.snapshots import DashboardSnapshots
from gateway.operations.endpoints import FindStored, Internal, InternalParts
from gateway.operations.health.collector import HealthCollector, audit_lag
from gateway.operations.health.connection_probe import ConnectionProbe
from gateway.operations.lookups import LookupParts, Lookups
from gateway.operations.runbooks import Runbooks
from gateway.operations.session import SessionAuth
from gateway.pool import PoolParts, Shared
from gateway.pool_lifecycle import PoolLifecycle
from gateway.pools import Pools
from gateway.standby_scheduler import Schedule
from gateway.translations.message_endpoints import MESSAGE_FORM, MESSAGES, CountTokens
from gateway.translations.response_handlers import ResponseHandlers
from gateway.translations.response_store import ResponseStore
from gateway.version import installed_version
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.limits import AUXILIARY
from scheduler.body_store import BodyStore
from scheduler.protocol.history import HOUR, WEEK, HistoryStore
from scheduler.redis_client.keys import DEFAULT_CELL, cell_of

API_FORMATS = {
    "/v1/inference": INFERENCE,
    "/v1/predict": PREDICT,
    "/api/inference": PLAIN,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/messages": MESSAGES,
}
"""The path of each inference endpoint, and its format."""

FAST_PATHS = ("/v1/inference", "/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class GatewayParts(PoolParts):
    """The parts of one gateway: those of its own pool, and those that all pools share."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        find_stored: FindStored | None = None,
        find_usage: FindUsage | None = None,
        tokens: TokenLookup | None = None,
        *,
        connect: Connect | None = None,
        traces: RequestTraces | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.drain_state = DrainState()
        counters = Counters()
        self.authenticator = self._authenticator(config, catalog, tokens, counters)
        faults = ErrorResponses(random.random)
        self.pools = Pools(catalog, Homes(catalog), config)
        shared = Shared(
            catalog=catalog,
            pools=self.pools,
            faults=faults,
            charge_replay=self.authenticator.charge,
            counters=counters,
            body_store=body_store(config),
            request_log=RequestLog() if config.request_log else None,
            traces=traces,
            schedule=schedule,
        )
        super().__init__(config, shared)
        self.pools.add(self)
        self.pool_lifecycle = PoolLifecycle(
            catalog,
            self.pools,
            lambda pool, url: PoolParts(pool_config(config, pool, url), shared),
            shared.tasks,
        )
        self.entry = entry = self._entry(catalog)
        jobs_of = self.pools.jobs_of
        self.job_submit = JobSubmitHandler(InferenceHandler(entry, INFERENCE), entry, self.jobs, jobs_of)
        self.job_results = JobResultHandler(entry, faults, self.jobs, jobs_of)
        self.batches = BatchService(
            config, entry=entry, jobs=self.jobs, jobs_of=jobs_of, faults=faults, counters=counters
        )
        jobs = config.jobs
        self.connection_probe = ConnectionProbe("" if jobs is None else jobs.session_url or jobs.database_url)
        self.snapshots = self._snapshots(config, catalog)
        self.internal = Internal(
            InternalParts(
                service_token=config.service_token,
                catalog=catalog,
                pools=self.pools,
                drain_state=self.drain_state,
                find_stored=find_stored,
                authenticator=self.authenticator,
                snapshots=self.snapshots,
            )
        )
        self.me = self._account(find_usage)
        self.account = self._account_handlers(faults)
        self.responses = self._responses(faults)
        models = Models(self.authenticator, self.pools.limits_of, self.pools, faults)
        self.open_inference = self._open_inference(catalog, faults)
        session_auth = SessionAuth(config.service_token, self.authenticator)
        self.actions = Actions(session_auth, connect, self.pools)
        self.lookups = self._lookups(catalog, session_auth, connect)
        self.metrics = Metrics(counters, config.metrics_dir, config.gateway_id, self._metrics_sources(catalog))
        self._routes = build_routes(self, models, Dashboard(session_auth, self.snapshots))
        self._fast_path = FastPath(entry, {path: API_FORMATS[path] for path in FAST_PATHS})

    def _snapshots(self, config: GatewayConfig, catalog: Catalog) -> DashboardSnapshots:
        stores = [HistoryStore(self._client, self._keys, config.gateway_id, kept) for kept in (HOUR, WEEK)]
        return DashboardSnapshots(
            HealthCollector(
                catalog,
                self.pools,
                self.drain_state,
                self.authenticator,
                connection_problem=lambda: self.connection_probe.problem,
            ),
            catalog,
            DashboardHistory(*stores),
            config.gateway_id,
            installation=config.installation,
            batches=self.batches.open_batches,
        )

    def _responses(self, faults: ErrorResponses) -> ResponseHandlers:
        return ResponseHandlers(
            self.entry,
            own=self.jobs,
            submit=self.job_submit,
            results=self.job_results,
            faults=faults,
            store=ResponseStore(self.config.responses),
        )

    def _metrics_sources(self, catalog: Catalog) -> MetricsSources:
        return MetricsSources(
            figures=self._pool_figures,
            resubmitted=self._resubmitted,
            full_batches=self._full_batches,
            open_batches=self.batches.open_batches,
            catalog=catalog,
        )

    def _authenticator(
        self, config: GatewayConfig, catalog: Catalog, tokens: TokenLookup | None, counters: Counters
    ) -> Authenticator:
        throttle = None if config.auth_failures == "off" else AuthThrottle(config.auth_failures)
        charge = self._auxiliary_limits(catalog, counters).charge
        return Authenticator(catalog, tokens, throttle, charge=charge, trusted_proxies=config.trusted_proxies)

    def _entry(self, catalog: Catalog) -> Entry:
        config = self.config
        return Entry(
            own=self.inference,
            place_call=self.pools.place,
            permit=self.pools.permitted,
            largest=self.pools.largest,
            limits_of=self.pools.limits_of,
            authenticator=self.authenticator,
            catalog=catalog,
            drain_state=self.drain_state,
            bodies=BodyBudget(
                config.body_memory_bytes, config.customer_body_memory_bytes, config.key_body_memory_bytes
            ),
        )

    def _account(self, find_usage: FindUsage | None) -> AccountEndpoint:
        return AccountEndpoint(
            AccountParts(
                authenticator=self.authenticator,
                home=self._account_home,
                find_usage=find_usage,
            )
        )

    def _account_handlers(self, faults: ErrorResponses) -> AccountHandlers:
        url = None if self.config.jobs is None else self.config.jobs.database_url
        reports = UsageReports(None if url is None else usage_reader(url))
        secret = b"" if self.config.jobs is None else self.config.jobs.callback_secret
        return AccountHandlers(
            self.entry, faults, reports, AccountStore(url), callback_secret=secret, served=self.pools.names
        )

    def _auxiliary_limits(self, catalog: Catalog, counters: Counters) -> AuxiliaryLimits:
        """They are used once requests arrive, when the other parts exist."""
        return AuxiliaryLimits(
            catalog,
            gateways=lambda: len(seen.gateways) if (seen := self.heartbeat.observation) else 1,
            headers=lambda identity: self.pools.limits_of(identity).headers(identity),
            rejected=partial(counters.rate_limited, AUXILIARY.outcome),
        )

    def _account_home(self, identity: Identity) -> AccountHome:
        parts = self.pools.home(identity)
        return AccountHome(parts.inference.customer_limits, parts.read_limits, parts.gpu_share)

    def _open_inference(self, catalog: Catalog, faults: ErrorResponses) -> OpenInferenceParts:
        return OpenInferenceParts(
            authenticator=self.authenticator,
            catalog=catalog,
            limits_of=self.pools.limits_of,
            error_responses=faults,
            names=self.pools.names,
            not_ready=self.internal.not_ready,
            model_ready=self.pools.has_gpu,
            version=installed_version(),
        )

    def _lookups(self, catalog: Catalog, session_auth: SessionAuth, connect: Connect | None) -> Lookups:
        return Lookups(
            LookupParts(
                session_auth=session_auth,
                catalog=catalog,
                pools=self.pools,
                internal=self.internal,
                transaction=AuditedTransaction(connect),
            )
        )

    async def _pool_figures(self) -> Sequence[PoolFigures]:
        return [await pool_figures(parts) for parts in self.pools.named]

    def _resubmitted(self) -> int:
        return sum(parts.recovery.submitted_again for parts in self.pools.all)

    def _full_batches(self) -> Mapping[tuple[str, str], int]:
        models = self.snapshot.models if self.snapshot is not None else {}
        return {(row.pool, name): row.max_batch_size for name, row in models.items()}


def body_store(config: GatewayConfig) -> BodyStore:
    """The files of large chats."""
    return BodyStore(config.body_dir, config.inline_body_bytes, config.body_store_bytes, config.longest.total_ms / 1000)


async def pool_figures(parts: PoolParts) -> PoolFigures:
    """The values of one pool for the metrics."""
    snapshot, limits = parts.snapshot, parts.limits
    tiers = [tier.name for tier in snapshot.tiers] if snapshot else []
    seen = parts.heartbeat.observation
    return PoolFigures(
        pool=parts.config.place,
        observation=seen,
        age_s=parts.heartbeat.age_s(),
        capacity_rps=limits.cell_capacity_rps,
        factors={name: limits.factor(name) for name in tiers},
        demand={name: limits.demand(name) for name in tiers},
        fairness={name: tier_gpu_time(name, seen.gateways if seen else ()).fairness for name in tiers},
        memory_share=limits.memory_share,
        audit_lag_ms=(await audit_lag(parts))[0],
        # Of the pool in all cells.
        recommended_workers=parts.scale.recommended if parts.config.cell == DEFAULT_CELL else 0,
        breakers=parts.direct.view().breakers,
    )


def pool_config(config: GatewayConfig, pool: str, redis_url: str) -> GatewayConfig:
    """The configuration for another pool or cell. Its spool has its own folder, since it belongs to Redis keys of its own."""
    is_own = pool == config.pool
    cell = cell_of(redis_url)
    data_dir = config.data_dir
    if data_dir is not None and cell != DEFAULT_CELL:
        data_dir = data_dir / "cells" / cell
    if data_dir is not None and not is_own:
        data_dir = data_dir / "pools" / pool
    model = config.default_model if is_own else None
    return replace(config, redis_url=redis_url, pool=pool, default_model=model, data_dir=data_dir)


def build_routes(parts: GatewayParts, models: Models, dashboard: Dashboard) -> Router:
    """All routes of a gateway. gateway/openapi/endpoints.py describes each of them; a test compares both."""
    routes = Router()
    pages, runbooks, internal, results = Pages(), Runbooks(), parts.internal, parts.job_results
    cordons, letters = parts.actions.cordons, parts.actions.dead_letters
    for path, api_format in API_FORMATS.items():
        routes.add("POST", path, InferenceHandler(parts.entry, api_format), queued=True)
    routes.add("POST", "/v1/messages/count_tokens", CountTokens(parts.entry))
    routes.set_form("/v1/messages", MESSAGE_FORM)
    routes.set_form("/v2", TENSOR_FORM)
    routes.add("POST", "/v1/inference", parts.job_submit, queued=True)
    tensors = OpenInference(parts.open_inference, partial(InferenceHandler, parts.entry))
    routes.add("POST", INFER, tensors.infer, queued=True)
    routes.add("DELETE", "/v1/result/{id}", results.delete)
    routes.add("POST", "/v1/responses", parts.responses.create, queued=True)
    routes.add("POST", "/v1/responses/input_tokens", parts.responses.count)
    routes.add("DELETE", "/v1/responses/{id}", parts.responses.delete)
    routes.add("POST", "/v1/responses/{id}/cancel", parts.responses.cancel)
    add_batch_routes(routes, parts.batches.handlers)
    add_account_routes(routes, parts.me, parts.account)
    routes.add("GET", "/internal/health", internal.health)
    routes.add("GET", "/internal/requests/{id}", internal.request)
    routes.add("GET", "/internal/autoscale", internal.autoscale)
    routes.add("GET", "/internal/dashboard", dashboard.page)
    routes.add("POST", "/internal/dashboard/session", dashboard.log_in)
    routes.add("DELETE", "/internal/dashboard/session", dashboard.log_out)
    routes.add("GET", "/internal/dashboard/events", dashboard.events)
    routes.add("GET", "/internal/dashboard/history", dashboard.history)
    routes.add("GET", "/internal/dashboard/customers/{id}", parts.lookups.customer)
    routes.add("GET", "/internal/dashboard/requests/{id}", parts.lookups.request)
    routes.add("POST", "/internal/dashboard/workers/cordon", cordons.cordon)
    routes.add("POST", "/internal/dashboard/workers/uncordon", cordons.uncordon)
    routes.add("GET", "/internal/dashboard/dead-letters", letters.groups)
    routes.add("POST", "/internal/dashboard/dead-letters/requeue", letters.requeue)
    routes.add("POST", "/internal/dashboard/dead-letters/purge", letters.purge)
    for method in ("GET", "HEAD"):
        routes.add(method, "/internal/dashboard/assets/{id}", dashboard.asset)
        routes.add(method, "/internal/runbooks/{id}", runbooks)
        routes.add(method, "/v1/result/{id}", results.get)
        routes.add(method, "/v1/responses/{id}", parts.responses.retrieve)
        routes.add(method, "/v1/responses/{id}/input_items", parts.responses.input_items)
        routes.add(method, "/v1/models", models.list)
        routes.add(method, "/v1/models/{id...}", models.one)
        routes.add(method, "/v2", tensors.server)
        routes.add(method, "/v2/health/live", tensors.live)
        routes.add(method, "/v2/health/ready", tensors.ready)
        routes.add(method, "/v2/models/{id...}", tensors.model)
        routes.add(method, "/v2/models/{id...}/ready", tensors.model_ready)
        # Load programs look at /health, as at vLLM's server.
        for path, probe in (("/livez", internal.livez), ("/readyz", internal.readyz), ("/health", internal.readyz)):
            routes.add(method, path, probe)
        routes.add(method, "/metrics", parts.metrics)
        routes.add(method, "/docs", pages.reference)
        routes.add(method, "/openapi.json", pages.description)
    return routes


def add_account_routes(routes: Router, me: AccountEndpoint, account: AccountHandlers) -> None:
    """The routes of a customer's own account, and of its page."""
    account_page = AccountPage()
    routes.add("POST", "/v1/keys", account.create_key)
    routes.add("DELETE", "/v1/keys/{id}", account.revoke_key)
    routes.add("POST", "/v1/webhook-secret/rotate", account.rotate_webhook_secret)
    for method in ("GET", "HEAD"):
        routes.add(method, "/", account_page.page)
        routes.add(method, "/assets/{id}", account_page.asset)
        routes.add(method, "/v1/me", me)
        routes.add(method, "/v1/usage", account.usage)
        routes.add(method, "/v1/jobs", account.jobs)
        routes.add(method, "/v1/keys", account.keys)
        routes.add(method, "/v1/webhook-secret", account.webhook_secret)


def add_batch_routes(routes: Router, batches: BatchHandlers) -> None:
    """The routes of files and batches."""
    routes.add("POST", "/v1/files", batches.upload)
    routes.add("DELETE", "/v1/files/{id}", batches.delete_file)
    routes.add("POST", "/v1/batches", batches.create)
    routes.add("POST", "/v1/batches/{id}/cancel", batches.cancel)
    for method in ("GET", "HEAD"):
        routes.add(method, "/v1/files", batches.list_files)
        routes.add(method, "/v1/files/{id}", batches.file)
        routes.add(method, "/v1/files/{id}/content", batches.content)
        routes.add(method, "/v1/batches", batches.list_batches)
        routes.add(method, "/v1/batches/{id}", batches.batch)
