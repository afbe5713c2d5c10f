"""One pool for tests: the calls of the protocol with short names, and the state in Redis."""

from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from configs import GONE_MS, LEASE_MS, PASS_MS, REPLAYS
from customer_limits import submission_of
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import Admissions, Submission, TierLimit, Verdict
from scheduler.protocol.adoption import Adoption
from scheduler.protocol.audit_outbox import Outbox
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, Record, decode_entry
from scheduler.protocol.batches import Batches, ClaimedBatch, Outcome
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.pool_view import GatewayStats, WorkerReport
from scheduler.protocol.presence import BeatReply, Presence
from scheduler.protocol.replies import Results
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id

TIERS = ("enterprise", "paid", "free")
WIDE = [TierLimit(name, 1e6, 1e6, 1000, TIERS[: i + 1]) for i, name in enumerate(TIERS)]


class Pool:
    """One pool, without effective limits unless a test sets them. `places`: those in each tier queue."""

    def __init__(
        self, client: Redis, keys: Keys, *, lease_ms: int = LEASE_MS, gone_ms: int = GONE_MS, places: int = 64
    ) -> None:
        self.client = client
        self.keys = keys
        self.batches = Batches(client, keys, lease_ms=lease_ms)
        self.terminations = Terminations(client, keys, lease_ms=lease_ms)
        self.presence = Presence(client, keys, gone_ms=gone_ms)
        self.results = Results(client, keys)
        self.outbox = Outbox(client, keys, "auditor")
        self.adoption = Adoption(client, keys)
        self.tiers = [msgspec.structs.replace(tier, places=places) for tier in WIDE]
        self._formed = 0

    async def gateway_lives(self, gateway_id: str) -> BeatReply:
        return await self.presence.gateway_beat(GatewayStats(gateway_id, 0.0, {}))

    async def gateway_stays(self, gateway_id: str) -> None:
        """Its heartbeat does not expire, however slow this machine is."""
        await self.gateway_lives(gateway_id)
        await self.client.pexpire(self.keys.gateway(gateway_id), 600_000)

    async def worker_beats(self, worker_id: str, status: str = "ready") -> None:
        await self.presence.worker_beat(WorkerReport(worker_id, status, 0.5, 1, 100.0, 50.0, "simulated", "v1"))

    def submission(self, tier: str = "free", **changes: Any) -> Submission:
        fields: dict[str, Any] = {
            "id": new_request_id(),
            "tier": tier,
            "customer_id": "customer",
            "api_key_id": "key",
            "nonce": "0123456789abcdef",
            "model": "tiny",
            "input_bytes": 5,
            "total_ms": 4000,
            "queue_ms": 2000,
            "rate": 1e6,
            "burst": 1e6,
            "body": encode_payload(Payload("tiny", "hello", {})),
        }
        return submission_of(fields | changes)

    async def admit(
        self,
        submissions: Sequence[Submission],
        tiers: Sequence[TierLimit] = (),
        capacity: float = 0.0,
        gateway: str = "g1",
        redis_ms: int = 0,
    ) -> list[Verdict]:
        return await self.admissions(gateway).admit(tiers or self.tiers, capacity, submissions, redis_ms)

    def admissions(self, gateway: str) -> Admissions:
        """The admit script of one gateway."""
        return Admissions(self.client, self.keys, gateway, replays=REPLAYS, pass_ms=PASS_MS)

    async def now_ms(self) -> int:
        """Redis TIME."""
        seconds, micros = await self.client.time()
        return int(seconds * 1000 + micros // 1000)

    async def queue(self, count: int, tier: str = "free", **changes: Any) -> list[str]:
        """Admit `count` requests; their ids, oldest first."""
        submissions = [self.submission(tier, **changes) for _ in range(count)]
        verdicts = await self.admit(submissions)
        assert {v.outcome for v in verdicts} <= {"accepted"}
        return [s.id for s in submissions]

    async def overdue(self, ids: Sequence[str], field: str = "qdl") -> list[str]:
        """Move these past their queue timeout (`qdl`) or their deadline (`dl`)."""
        for request_id in ids:
            await self.timed(request_id, **{field: 1})
        return list(ids)

    async def times(self, request_id: str) -> dict[str, int]:
        """The times in its row: acceptance, deadline, queue deadline."""
        env = await self.client.hget(self.keys.request(request_id), "env")
        return dict(zip(("at", "dl", "qdl"), map(int, env.split()[:3]), strict=True))

    async def timed(self, request_id: str, **ms: int) -> None:
        """Change times in its row."""
        times = await self.times(request_id) | ms
        env = await self.client.hget(self.keys.request(request_id), "env")
        columns = b"".join(b"%013d " % max(1, times[name]) for name in ("at", "dl", "qdl"))
        await self.client.hset(self.keys.request(request_id), "env", columns + env[len(columns) :])

    async def age(self, request_id: str) -> None:
        """Make it as old as its queue timeout."""
        times = await self.times(request_id)
        by_ms = times["qdl"] - await self.now_ms() + 1
        await self.timed(request_id, at=times["at"] - by_ms, qdl=times["qdl"] - by_ms)

    async def attempts(self, request_id: str) -> int:
        """The number of its attempts."""
        detail = await self.results.request_detail(request_id)
        assert detail is not None
        return detail.attempts

    async def aged(self, ids: Sequence[str], ms: int) -> None:
        """Make these older by `ms`."""
        for request_id in ids:
            await self.timed(request_id, at=(await self.times(request_id))["at"] - ms)

    async def form(self, picks: Sequence[tuple[str, int]], lookahead: int = 100) -> str:
        """Form a batch; its id."""
        self._formed += 1
        batch_id = f"b{self._formed}"
        await self.batches.form(batch_id, picks, lookahead, TIERS)
        return batch_id

    async def pop(self) -> str | None:
        """The next ready batch id, without blocking."""
        popped = await self.client.lpop(self.keys.batch_queue)
        return popped.decode() if popped else None

    async def claim_next(self, worker_id: str = "w1", token: str = "token") -> ClaimedBatch:
        """Claim the next ready batch."""
        batch_id = await self.pop()
        assert batch_id is not None
        claimed = await self.batches.claim(batch_id, worker_id, token)
        assert claimed is not None
        return claimed

    async def running(self, count: int, tier: str = "free", token: str = "token") -> ClaimedBatch:
        """A claimed batch of `count` new requests."""
        await self.queue(count, tier)
        await self.form([(tier, count)])
        return await self.claim_next("w1", token)

    async def states(self, ids: Sequence[str]) -> list[str]:
        return [(await self.client.hget(self.keys.request(i), "state")).decode() for i in ids]

    async def depth(self, tier: str) -> int:
        waiting = await self.client.get(self.keys.waiting(tier))
        return int(await self.client.llen(self.keys.queue(tier))) + int(waiting or 0)

    async def inflight(self) -> dict[str, list[str]]:
        """Every inflight list and its ids, oldest first."""
        found = {}
        async for key in self.client.scan_iter(f"{self.keys.prefix}inflight:*"):
            found[key.decode()] = [i.decode() for i in reversed(await self.client.lrange(key, 0, -1))]
        return found

    async def audit(self) -> tuple[list[AcceptedRecord], list[EndedRecord]]:
        """The accepted and ended records in the outbox, oldest first."""
        records = await self.records()
        return [r for r in records if isinstance(r, AcceptedRecord)], [r for r in records if isinstance(r, EndedRecord)]

    async def letters(self) -> list[DeadLetterRecord]:
        """The dead letters in the outbox, oldest first."""
        return [r for r in await self.records() if isinstance(r, DeadLetterRecord)]

    async def records(self) -> list[Record]:
        """All records in the outbox, oldest first."""
        entries = await self.client.lrange(self.keys.outbox, 0, -1)
        return [record for entry in reversed(entries) for record in decode_entry(entry)[0]]

    async def reaped(self) -> None:
        """Expire all leases, and run the reaper in time."""
        await self.expire_leases()
        await self.client.delete(self.keys.reaped_at)
        await self.terminations.reap(0)

    async def expire_leases(self) -> None:
        """Expire all leases."""
        if leased := await self.client.zrange(self.keys.leases, 0, -1):
            await self.client.zadd(self.keys.leases, dict.fromkeys(leased, 1))


def done(request_id: str, output: str = "olleh") -> Outcome:
    """A completed outcome."""
    return Outcome(request_id, "", 50.0, 5, "v1", output)
