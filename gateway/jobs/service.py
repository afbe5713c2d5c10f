"""Asynchronous jobs of one pool: admission, the reconciler, the callbacks, and their loops."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.circuit_breaker import CallWatch
from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.inference.admission import AdmissionLimits, Hold
from gateway.inference.pending import PendingRequest
from gateway.inference.pipeline import InferenceParts, InferencePipeline
from gateway.inference.responses import ResponseSubscriber
from gateway.jobs.admission import JobAdmitter
from gateway.jobs.inbox import JobInbox
from gateway.jobs.job_end import end_of
from gateway.jobs.reconciler import JobReconciler
from gateway.jobs.scan import JobScan
from gateway.jobs.store import JobStore
from gateway.jobs.webhooks import Callbacks
from gateway.limits.quota_uses import QuotaUses
from ledger.jobs import JobEnd, JobRow
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.admission import Admissions, Submission
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.replies import Results
from scheduler.protocol.request_status import RequestStatuses
from scheduler.redis_client.connections import subscriber_client
from scheduler.redis_client.keys import JOBS_GATEWAY, Keys
from scheduler.tasks import Loop, TaskRegistry

NOT_NOW = "Jobs cannot be taken right now; try again soon."


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """What jobs use: the pipeline and its parts, and the limits for admission. `ask` lets the limits of a customer arrive."""

    inference: InferencePipeline
    parts: InferenceParts
    client: Redis
    limits: Callable[[], AdmissionLimits]
    watch: CallWatch
    tasks: TaskRegistry
    hold: Hold
    ask: Callable[[Submission], None]
    quota_uses: QuotaUses


class Jobs:
    """The jobs of one pool. Without a JobConfig `Prefer: respond-async` is ignored, and no task is known."""

    def __init__(self, parts: JobParts) -> None:
        config = parts.parts.config
        self.store: JobStore | None = None
        self.serving: JobServing | None = None
        if config.jobs is not None:
            self.store = JobStore(config.jobs.database_url, config.place, config.jobs.kept_ms / 1000)
            self.serving = JobServing(parts, config.jobs, self.store)
        self.under_way = 0  # Submissions that are being handled; a gateway that drains waits for these.
        self._cancellations = parts.parts.cancellations
        self._terminations = Terminations(
            parts.client, Keys.at(config.redis_url, config.pool), lease_ms=config.lease_ms
        )

    @contextlib.contextmanager
    def submission(self) -> Iterator[None]:
        """Count a submission while it is being handled, if this gateway serves jobs."""
        count = int(self.serving is not None)
        self.under_way += count
        try:
            yield
        finally:
            self.under_way -= count

    async def cancel(self, row: JobRow) -> None:
        """End a job with its reply in Redis if there is one, or else as cancelled.

        A job that is running finishes, and its result is discarded. Raises StoreUnavailable.
        """
        end = JobEnd(row.id, ErrorCode.CANCELLED, customer_id=row.customer_id)
        try:
            (reply,) = await self._terminations.cancel([(row.id, ErrorCode.CANCELLED)])
        except RedisUnavailable:
            self._cancellations.add(row.id, ErrorCode.CANCELLED)
        else:
            end = end if reply is None else end_of(reply)
        if self.store is not None:
            await self.store.end(end)

    @property
    def problem(self) -> str | None:
        """Why the last job could not be stored, for a few seconds; None if it was, or none was tried."""
        return self.store.problem if self.store is not None else None

    def loops(self) -> dict[str, Loop]:
        """The loops to run, by name."""
        if self.serving is None:
            return {}
        return {"job admitter": self.serving.admission.run, "job reconciler": self.serving.reconciler.run}

    async def close(self) -> None:
        """Close the connections. Must be called after the loops were stopped."""
        if self.store is not None:
            await self.store.close()
        if self.serving is not None:
            await self.serving.listener.aclose()


class JobServing:
    """The parts of a pool whose gateway serves jobs. `left`: its cell is closed, so what it has submitted is not read any more."""

    def __init__(self, parts: JobParts, jobs: JobConfig, store: JobStore) -> None:
        config, client, catalog = parts.parts.config, parts.client, parts.parts.catalog
        keys = self._keys = Keys.at(config.redis_url, config.pool)
        # Redis keeps replies as long as PostgreSQL keeps results, so the reconciler may be down for as long without a loss.
        self.admissions = Admissions(
            client, keys, JOBS_GATEWAY, jobs.kept_ms, replays=config.replays, pass_ms=config.reap_ms
        )
        self.pipeline, self.config, self.store = parts.inference, jobs, store
        self.cancellations, self.remember = parts.parts.cancellations, parts.parts.remember
        self.limits, self.ask, self.quota_uses = parts.limits, parts.ask, parts.quota_uses
        self.left = False
        self._parts = parts.parts
        self.admission = JobAdmitter(
            self.admissions,
            parts.limits,
            self.cancellations,
            config.max_pending,
            watch=parts.watch,
            hold=parts.hold,
            quota_uses=parts.quota_uses,
        )

        def own_hosts(customer_id: str) -> str | None:
            customer = catalog.snapshot.customers.get(customer_id) if catalog.snapshot else None
            return customer.callback_hosts if customer else None

        self.hosts = CallbackHosts(jobs.callback_hosts, own_hosts, enabled=bool(jobs.callback_secret))
        self.terminations = Terminations(client, keys, lease_ms=config.lease_ms)
        self.statuses = RequestStatuses(client, keys)
        self.listener = subscriber_client(config.redis_url)
        self.callbacks = Callbacks(jobs, config.place, self.hosts)
        self.inbox = JobInbox()
        self._results = Results(client, keys)
        self._tasks = parts.tasks
        self.scan = JobScan(config.place, self.statuses, self.terminations, self.admissions, parts.limits)
        self.reconciler = JobReconciler(
            jobs.session_url or jobs.database_url,
            config.place,
            jobs.kept_ms / 1000,
            inbox=self.inbox,
            scan=self.scan,
            stored=self.terminations.stored,
            companions=self._companions,
            ended=self.callbacks.wake,
        )

    def leave(self) -> None:
        """The cell of the pool is closed."""
        self.left = True

    def problem(self, now: float) -> RequestError | None:
        """Why no job can be admitted now (monotonic seconds); None if nothing is known to prevent it."""
        parts = self._parts
        if parts.limits.model_too_slow:
            return RequestError(ErrorCode.MODEL_TOO_SLOW)
        if parts.direct.active or parts.limits.no_gpu(now):
            return RequestError(ErrorCode.NO_CAPACITY, NOT_NOW)
        if parts.limits.short_of_memory:
            return RequestError(ErrorCode.BACKPRESSURE)
        return None

    def submit(self, pending: PendingRequest) -> None:
        """Submit a job to admission. Raises RequestError if it is rejected before that."""
        error = self.problem(pending.started)
        if error is None and not self.admission.submit(pending):
            error = RequestError(ErrorCode.QUEUE_FULL)
        if error is not None:
            self._parts.demand_meter.passed(pending.submission.tier)
            self._parts.demand_meter.shed(pending.submission.tier)
            raise error

    def _companions(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The loops that run while this gateway's reconciler is active."""
        channel, inbox = self._keys.responses(JOBS_GATEWAY), self.inbox
        subscriber = ResponseSubscriber(self.listener, channel, inbox, self._results, resubscribed=inbox.missed)
        run_forever = self._tasks.run_forever
        return (run_forever("job subscriber", subscriber.run), run_forever("callbacks", self.callbacks.run))
