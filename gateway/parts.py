"""A gateway put together: its parts and who knows whom. The only place that knows all of them; nothing runs here."""

import math
import random
import time

from gateway.admitter import Admitter, Limits
from gateway.audit_lag import AuditLag
from gateway.auth_throttle import AuthThrottle
from gateway.beat import Beat
from gateway.cancels import Cancels
from gateway.catalog_view import CatalogView
from gateway.chat import CHAT
from gateway.completions import COMPLETIONS
from gateway.config import GatewayConfig
from gateway.dialect import INFERENCE
from gateway.direct import Direct, DirectParts
from gateway.direct_audit import DirectAudit
from gateway.doorman import Doorman
from gateway.doors import Doors
from gateway.embeddings import EMBEDDINGS
from gateway.exchange import Exchange
from gateway.fast_lane import FastLane
from gateway.faults import Faults
from gateway.identities import Identities, Tokens
from gateway.inference import Inference
from gateway.inference_parts import InferenceParts
from gateway.internal import FindStored, Internal, InternalParts
from gateway.jobs import JobParts, Jobs
from gateway.last_ends import LastEnds
from gateway.limits import LiveLimits
from gateway.me import FindUsage, Me, MeParts
from gateway.meter import Meter
from gateway.models import Models
from gateway.pages import Pages
from gateway.predict import PLAIN, PREDICT
from gateway.redis_watch import RedisWatch, ping
from gateway.refusals import Refusals
from gateway.routes import Routes
from gateway.subscriber import Subscriber
from gateway.sweep import DeadlineSweep
from gateway.waiters import Waiter, Waiters
from gateway.witness import Witness
from scheduler.admission import Admissions
from scheduler.adoption import Adoption
from scheduler.connections import command_client, subscriber_client
from scheduler.endings import Endings
from scheduler.keys import Keys
from scheduler.limit_state import LimitState
from scheduler.presence import Presence
from scheduler.replies import Results

DOORS = {
    "/v1/inference": INFERENCE,
    "/v1/predict": PREDICT,
    "/api/inference": PLAIN,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": EMBEDDINGS,
}
"""Where customers ask, and how each place speaks."""


class Parts:
    """What one gateway consists of."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: CatalogView,
        find_stored: FindStored | None = None,
        find_usage: FindUsage | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.config = config
        self._catalog = catalog
        self._client = command_client(config.redis_url)
        self._subscriber_client = subscriber_client(config.redis_url)
        keys = self._keys = Keys(config.pool)
        self._results = Results(self._client, keys)
        endings = Endings(self._client, keys)
        admissions = Admissions(self._client, keys, config.gateway_id)
        adoption, ends = Adoption(self._client, keys), LastEnds(config.gateway_id)
        self._presence = Presence(self._client, keys, gone_ms=config.gone_ms)
        self._meter = Meter(config.gateway_id, time.monotonic())
        self._faults = Faults(random.random)
        self.doors = Doors()
        self.identities = Identities(catalog, tokens)
        self.doorman = self._doorman()
        self.refusals = Refusals()
        self.waiters = Waiters(self._ended)
        self.cancels = Cancels(endings)
        self.limits = LiveLimits(config.pool)
        self.watch = RedisWatch(lambda: ping(self._client))
        self.admitter = Admitter(
            admissions,
            self._limits_now,
            self.cancels,
            config.max_pending,
            watch=self.watch,
            accepted_late=self._ended,
        )
        self.witness = Witness(
            waiters=self.waiters,
            ends=ends,
            admissions=admissions,
            adoption=adoption,
            limits=self._limits_now,
            cancels=self.cancels,
            p95_ms=lambda: self.beat.service_p95_ms,
        )
        self.sweep = DeadlineSweep(self.waiters, endings, self.cancels)
        self.beat = Beat(
            self._presence,
            catalog,
            self.limits,
            self._meter,
            listener=self.witness,
            watch=self.watch,
            refusals=self.refusals.drain,
        )
        self.direct = self._direct(adoption, ends)
        self.subscriber = self._subscriber()
        self.internal = self._internal(find_stored)
        inference, self.jobs = self._serving()
        self.me = self._me(inference, find_usage)
        self._routes = build_routes(inference, self.internal, self.me, self._models(inference), self.jobs)
        self._lane = FastLane(inference, self.doors)

    def _subscriber(self) -> Subscriber:
        return Subscriber(
            self._subscriber_client,
            self._keys.responses(self.config.gateway_id),
            self.waiters,
            self._results,
            anew=lambda: self.witness.suspect("the subscription was lost"),
            hear=self.waiters.hear_all,
        )

    def _doorman(self) -> Doorman:
        throttle = None if self.config.auth_failures == "off" else AuthThrottle(self.config.auth_failures)
        return Doorman(self.identities, throttle)

    def _me(self, inference: Inference, find_usage: FindUsage | None) -> Me:
        return Me(
            MeParts(
                doorman=self.doorman,
                standing=inference.standing,
                read_limits=LimitState(self._client, self._keys).read,
                find_usage=find_usage,
            )
        )

    def _direct(self, adoption: Adoption, ends: LastEnds) -> Direct:
        audit = DirectAudit(
            self.config.data_dir,
            self.config.gateway_id,
            self.config.spool_max_bytes,
            adoption,
            may_merge=lambda: self.watch.breaker.well,
            remember=ends.keep,
        )
        return Direct(
            DirectParts(
                config=self.config,
                catalog=self._catalog,
                limits=self.limits,
                waiters=self.waiters,
                cancels=self.cancels,
                beat=self.beat,
                watch=self.watch,
                audit=audit,
            )
        )

    def _serving(self) -> tuple[Inference, Jobs]:
        """What serves those who wait, and those who do not."""
        parts = InferenceParts(
            config=self.config,
            catalog=self._catalog,
            limits=self.limits,
            waiters=self.waiters,
            admitter=self.admitter,
            cancels=self.cancels,
            meter=self._meter,
            faults=self._faults,
            doors=self.doors,
            results=self._results,
            direct=self.direct,
            doorman=self.doorman,
            note_refusal=self.refusals.note,
            model_version=lambda: self.beat.model_version,
        )
        inference, limits, client = Inference(parts), self._limits_now, self._client
        return inference, Jobs(
            JobParts(inference=inference, parts=parts, client=client, limits=limits, watch=self.watch)
        )

    def _models(self, inference: Inference) -> Models:
        return Models(self.doorman, inference.standing, self._catalog, inference.models, self._faults)

    def _internal(self, find_stored: FindStored | None) -> Internal:
        return Internal(
            InternalParts(
                service_token=self.config.service_token,
                catalog=self._catalog,
                limits=self.limits,
                beat=self.beat,
                subscriber=self.subscriber,
                results=self._results,
                audit_lag=AuditLag(self._client, self._keys),
                doors=self.doors,
                direct=self.direct,
                find_stored=find_stored,
                doorman=self.doorman,
                identities=self.identities,
            )
        )

    def _ended(self, waiter: Waiter) -> None:
        self.witness.ended(waiter)

    def _limits_now(self) -> Limits:
        snapshot = self._catalog.snapshot
        limits = Limits((), 0.0) if snapshot is None else self.limits.current(snapshot)
        return limits._replace(redis_ms=self.beat.redis_ms(), run_ms=math.ceil(self.beat.service_p95_ms))


def build_routes(inference: Inference, internal: Internal, me: Me, models: Models, jobs: Jobs) -> Routes:
    """Every address that this gateway answers. Each is described in gateway/openapi_doors.py: a test compares them."""
    routes = Routes()
    pages = Pages()
    for path, dialect in DOORS.items():
        routes.add("POST", path, Exchange(inference, dialect))
    routes.add("POST", "/v1/inference", jobs.submit)
    routes.add("DELETE", "/v1/result/{id}", jobs.result.delete)
    routes.add("GET", "/internal/health", internal.health)
    routes.add("GET", "/internal/requests/{id}", internal.request)
    for method in ("GET", "HEAD"):
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
