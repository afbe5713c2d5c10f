"""Wiring of files and batches: the handlers, and the runner of batches with its loop.

Batches belong to no pool: each line joins the queue of the pool of its model, as a job of that pool.
"""

from collections.abc import Callable
from functools import partial

from gateway.batch_api.calls import identity_of
from gateway.batch_api.handlers import BatchHandlers
from gateway.batch_api.run import RunParts
from gateway.batch_api.runner import BatchFileRunner
from gateway.batch_api.store import FileStore
from gateway.config import GatewayConfig
from gateway.http.error_responses import ErrorResponses
from gateway.inference.entry import Entry
from gateway.jobs.service import Jobs
from gateway.metrics.counters import Counters
from ledger.batches import OpenBatches
from scheduler.tasks import Loop


class BatchService:
    """Files and batches of one gateway. `jobs`: those of its own pool; `jobs_of`: those of a place.

    Without a database, or without jobs, the handlers respond that there are none.
    """

    def __init__(
        self,
        gateway: GatewayConfig,
        *,
        entry: Entry,
        jobs: Jobs,
        jobs_of: Callable[[str], Jobs],
        faults: ErrorResponses,
        counters: Counters,
    ) -> None:
        config = gateway.batches
        served = bool(config.database_url) and jobs.serving is not None
        self.store = FileStore(config, gateway.pool, served=served)
        self.runner: BatchFileRunner | None = None
        if served:
            parts = RunParts(
                config=config,
                session=self.store.lines,
                entry=entry,
                jobs_of=jobs_of,
                most_body_bytes=gateway.longest.body_bytes,
                identity=partial(identity_of, entry.catalog),
                count=counters.batch_lines,
            )
            self.runner = BatchFileRunner(
                gateway.gateway_id, parts, entry.drain_state, gateway.pool if gateway.only_own else None
            )
        changed = self.runner.wake if self.runner is not None else lambda: None
        self.handlers = BatchHandlers(entry, self.store, faults=faults, changed=changed)

    def open_batches(self) -> OpenBatches | None:
        """The open batches of all gateways, as they were counted a few seconds ago; None if that is not known."""
        return None if self.runner is None else self.runner.open

    def loops(self) -> dict[str, Loop]:
        """The loops to run, by name."""
        return {} if self.runner is None else {"batches": self.runner.run}

    async def close(self) -> None:
        """End the leases and close the connections. Must be called after the loops were stopped."""
        if self.runner is not None:
            await self.runner.release()
        await self.store.close()
