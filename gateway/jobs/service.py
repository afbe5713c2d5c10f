"""Wiring of asynchronous jobs: the handlers, the reconciler, the callbacks, and their loops."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gateway.api.inference import INFERENCE
from gateway.circuit_breaker import CallWatch
from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.http.router import Handler
from gateway.inference.admission import AdmissionLimits, Hold
from gateway.inference.handler import InferenceHandler
from gateway.inference.pipeline import InferenceParts, InferencePipeline
from gateway.inference.responses import ResponseSubscriber
from gateway.jobs.inbox import JobInbox
from gateway.jobs.reconciler import JobReconciler
from gateway.jobs.results import JobResultHandler
from gateway.jobs.scan import JobScan
from gateway.jobs.store import JobStore
from gateway.jobs.submit import JobAdmitter, JobRedis, JobSubmitHandler
from gateway.jobs.webhooks import Callbacks
from scheduler.protocol.admission import Admissions, Submission
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.replies import Results
from scheduler.protocol.request_status import RequestStatuses
from scheduler.redis_client.connections import subscriber_client
from scheduler.redis_client.keys import JOBS_GATEWAY, Keys
from scheduler.tasks import Loop, TaskRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """What jobs use: the pipeline and its parts, and the limits for admission."""

    inference: InferencePipeline
    parts: InferenceParts
    client: Redis
    limits: Callable[[], AdmissionLimits]
    watch: CallWatch
    tasks: TaskRegistry
    hold: Hold
    ask: Callable[[Submission], None]


class Jobs:
    """The jobs of one pool. Without a JobConfig `Prefer: respond-async` is ignored, and no task is known."""

    def __init__(self, parts: JobParts) -> None:
        config = parts.parts.config
        self._store: JobStore | None = None
        self.serving: JobServing | None = None
        self.submit: Handler = InferenceHandler(parts.inference, INFERENCE)
        if config.jobs is not None:
            self._store = JobStore(config.jobs.database_url, config.place, config.jobs.kept_ms / 1000)
            self.serving = JobServing(parts, config.jobs, self._store, self.submit)
            self.submit = self.serving.submit
        terminations = Terminations(parts.client, Keys.at(config.redis_url, config.pool), lease_ms=config.lease_ms)
        self.result = JobResultHandler(
            parts.inference, parts.parts.error_responses, terminations, parts.parts.cancellations, self._store
        )

    @property
    def under_way(self) -> int:
        """Number of job submissions that are being handled."""
        return self.serving.submit.under_way if self.serving else 0

    @property
    def problem(self) -> str | None:
        """Why the last job could not be stored, for a few seconds; None if it was, or none was tried."""
        return self._store.problem if self._store is not None else None

    def loops(self) -> dict[str, Loop]:
        """The loops to run, by name."""
        if self.serving is None:
            return {}
        return {"job admitter": self.serving.admission.run, "job reconciler": self.serving.reconciler.run}

    async def close(self) -> None:
        """Close the connections. Must be called after the loops were stopped."""
        if self._store is not None:
            await self._store.close()
        if self.serving is not None:
            await self.serving.listener.aclose()


class JobServing:
    """The parts of a gateway that serves jobs."""

    def __init__(self, parts: JobParts, jobs: JobConfig, store: JobStore, waiting: Handler) -> None:
        config, client = parts.parts.config, parts.client
        keys = self._keys = Keys.at(config.redis_url, config.pool)
        # Redis keeps replies as long as PostgreSQL keeps results, so the reconciler may be down for as long without a loss.
        admissions = Admissions(
            client, keys, JOBS_GATEWAY, jobs.kept_ms, replays=config.replays, pass_ms=config.reap_ms
        )
        cancellations = parts.parts.cancellations
        self.admission = JobAdmitter(
            admissions, parts.limits, cancellations, config.max_pending, watch=parts.watch, hold=parts.hold
        )
        catalog = parts.parts.catalog

        def own_hosts(customer_id: str) -> str | None:
            customer = catalog.snapshot.customers.get(customer_id) if catalog.snapshot else None
            return customer.callback_hosts if customer else None

        hosts = CallbackHosts(jobs.callback_hosts, own_hosts, enabled=bool(jobs.callback_secret))
        terminations = Terminations(client, keys, lease_ms=config.lease_ms)
        self.submit = JobSubmitHandler(
            waiting,
            parts.inference,
            parts.parts,
            self.admission,
            store,
            redis=JobRedis(admissions, RequestStatuses(client, keys), terminations, parts.limits, parts.ask),
            hosts=hosts,
        )
        self.listener = subscriber_client(config.redis_url)
        self.callbacks = Callbacks(jobs, config.place, hosts)
        self.inbox = JobInbox()
        self._results = Results(client, keys)
        self._tasks = parts.tasks
        self.scan = JobScan(config.place, RequestStatuses(client, keys), terminations, admissions, parts.limits)
        self.reconciler = JobReconciler(
            jobs.session_url or jobs.database_url,
            config.place,
            jobs.kept_ms / 1000,
            inbox=self.inbox,
            scan=self.scan,
            stored=terminations.stored,
            companions=self._companions,
            ended=self.callbacks.wake,
        )

    def _companions(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The loops that run while this gateway's reconciler is active."""
        channel, inbox = self._keys.responses(JOBS_GATEWAY), self.inbox
        subscriber = ResponseSubscriber(self.listener, channel, inbox, self._results, resubscribed=inbox.missed)
        run_forever = self._tasks.run_forever
        return (run_forever("job subscriber", subscriber.run), run_forever("callbacks", self.callbacks.run))
