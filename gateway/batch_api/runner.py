"""The batches that this gateway runs: each by a task, under a lease in PostgreSQL that the gateway renews.

A batch whose owner is lost is claimed by another gateway when the lease has ended, and at once if the owner was stopped.
Losing a lease stops the run here. Two runs of one batch at a time cost GPU time, but write each line once.
"""

import asyncio
from contextlib import suppress

import structlog

from gateway.batch_api.run import BatchRun, RunParts
from gateway.http.router import DrainState
from ledger.batches import OpenBatches, claim_batches, count_open_batches, release_batches, renew_batches
from ledger.jobs import StoreUnavailable
from scheduler.fault_log import LoggedFaults, log_fault
from scheduler.tasks import end_all

log = structlog.get_logger("gateway")

RENEW_EVERY_S = 0.5
COUNT_EVERY_S = 5.0
MAX_RUNS = 32
"""Batches that one gateway runs at a time: each has a window of lines, and up to 4 MiB of bodies, in memory."""

RUNS_OF_CUSTOMER = 4
"""Batches of one customer that all gateways run at a time, so that no customer takes all places."""


class BatchFileRunner:
    """Claims batches and runs them. While the gateway drains, it runs none. `pool`: the only one that it serves; None: all."""

    def __init__(self, owner: str, parts: RunParts, drain_state: DrainState, pool: str | None) -> None:
        self._owner = owner
        self._pool = pool
        self._parts = parts
        self._drain_state = drain_state
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._count_at = 0.0
        self.open: OpenBatches | None = None  # Of all gateways; None before they were counted.

    def wake(self) -> None:
        """A batch was created or cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Claim and run batches; never returns."""
        try:
            while True:
                try:
                    await self._step()
                except StoreUnavailable as error:
                    log.info("batches cannot be claimed", reason=str(error))
                except Exception as error:  # noqa: BLE001 - no fault may end this loop
                    log_fault("claiming batches failed", error)
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_EVERY_S):
                        await self._wake.wait()
        finally:
            for _, task in self._runs.values():
                task.cancel()

    async def release(self) -> None:
        """End all runs and leases."""
        await end_all([task for _, task in self._runs.values()])
        self._runs.clear()
        with suppress(StoreUnavailable):  # They end by themselves.
            await self._parts.session.run(lambda c: release_batches(c, self._owner))

    async def _step(self) -> None:
        """Renew the leases, stop the runs that lost theirs, and claim more batches."""
        if self._drain_state.leaving:
            if self._runs:
                await self.release()
            return
        self._runs = {batch_id: (run, task) for batch_id, (run, task) in self._runs.items() if not task.done()}
        lease_s, session = self._parts.config.lease_s, self._parts.session
        if self._runs:
            ids = list(self._runs)
            kept = await session.run(lambda c: renew_batches(c, self._owner, lease_s, ids))
            for batch_id in ids:
                run, task = self._runs[batch_id]
                if batch_id in kept:
                    run.note(kept[batch_id])
                else:
                    task.cancel()
        now = asyncio.get_running_loop().time()
        if now >= self._count_at:
            self._count_at = now + COUNT_EVERY_S
            self.open = await session.run(count_open_batches)
        if (room := MAX_RUNS - len(self._runs)) > 0:
            rows = await session.run(
                lambda c: claim_batches(c, self._owner, lease_s, room, of_customer=RUNS_OF_CUSTOMER, pool=self._pool)
            )
            for row in rows:
                if row.id not in self._runs:
                    run = BatchRun(row, self._parts)
                    self._runs[row.id] = run, asyncio.create_task(self._run_one(run, row.id), name=f"batch {row.id}")

    async def _run_one(self, run: BatchRun, batch_id: str) -> None:
        with LoggedFaults("a batch stopped", batch=batch_id):  # Its lease ends, and a gateway claims it again.
            await run.run()
        self._wake.set()
