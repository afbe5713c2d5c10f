"""The state of the protocol model: one pool on a real server, the batches of workers, and the responses to clients."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from contract.protocol_laws import Life, Scan, scan
from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Submission
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.batches import ClaimedBatch, Outcome
from scheduler.protocol.replies import Reply, decode_replies
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.states import TERMINAL, Admission

T = TypeVar("T")
LONG_MS = 600_000  # Deadlines pass only by rules.
PATIENCE_S = 10.0  # A machine that is busy for longer than the timeout of a gateway is not a fault of the protocol.
GATEWAYS = ("g1", "g2")
LEASE = "return {redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0', unpack(redis.call('TIME'))}"


class Held(NamedTuple):
    """A batch that a worker has, or assumes to have."""

    batch_id: str
    token: str
    ids: list[str]

    def outcomes(self, kept: int, failed: int) -> list[Outcome]:
        """Outcomes of the first `kept` members; the first `failed` of them are failures of the model."""
        bad = [Outcome(i, "poison_request", 9.5, 0, "v1", "") for i in self.ids[:failed]]
        return (bad + [done(i) for i in self.ids[failed:]])[:kept]


class World(RuleBasedStateMachine):
    """One pool. All workers have the id `w`: only tokens distinguish them."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client, self.listener = command_client(self.url, PATIENCE_S), command_client(self.url, PATIENCE_S)
        self.run(self.client.flushall())
        self.pool = Pool(self.client, Keys(), places=2)  # Later ids wait in backlogs.
        self.channel = self.listener.pubsub()
        self.run(self.channel.subscribe(*map(self.pool.keys.responses, GATEWAYS)))
        self.run(self.gateways_live())
        self.life = Life()
        self.accepted: set[str] = set()  # Since the start, before losses of Redis too.
        self.answered: dict[str, tuple[str, str]] = {}  # The responses, which gateways remember.
        self.popped: list[str] = []
        self.held: list[Held] = []
        self.stale: list[Held] = []  # Batches of lost, slow or finished workers, which may continue.
        self.number = 0
        self.losses = self.waves = self.crowds = self.poisons = 0  # Rare: they leave little state, or take many calls.

    def run(self, call: Awaitable[T]) -> T:
        async def called() -> T:
            return await call

        return self.runner.run(called())

    def scan(self) -> Scan:
        return self.run(scan(self.pool, list(self.life.submissions)))

    def unchanged(self, call: Callable[[], Awaitable[T]]) -> T:
        before = self.scan().rows
        result = self.run(call())
        assert self.scan().rows == before, "a call without permission changed a request"
        return result

    def pick(self, some: int) -> str:
        return list(self.life.submissions)[some % len(self.life.submissions)]

    def enter(self, submissions: list[Submission]) -> None:
        self.accepted |= {s.id for s in submissions}
        self.life.submissions |= {s.id: s for s in submissions}
        for s in submissions:
            if s.idempotency and not (s.again and s.idempotency in self.life.holders):
                self.life.holders[s.idempotency] = (s.id, s.fingerprint)

    def expected(self, key: str, body: str) -> tuple[Admission, str]:
        """The expected outcome of an idempotency key."""
        holder, fingerprint = self.life.holders.get(key, ("", body))
        row = self.scan().rows.get(holder)
        if fingerprint != body:
            return Admission.REUSED, ""
        if row is None:
            return Admission.ACCEPTED, ""
        if row.state not in TERMINAL:
            return Admission.IN_PROGRESS, holder
        stands = (row.state == "completed" or row.code == "poison_request") and holder not in self.life.adopted
        return (Admission.REPLAYED, holder) if stands else (Admission.ACCEPTED, "")

    def answer(self, reply: Reply | None) -> None:
        if reply:
            self.answered.setdefault(reply.id, (reply.state, reply.error_code))

    async def adopt(self, ids: list[str]) -> None:
        pairs = [
            (
                AcceptedRecord(i, "customer", "key", "free", "tiny", "g1", 5, ""),
                EndedRecord(i, *self.answered[i], 1, 9.0, -1, 9.0, "", 1, "w", 1, 5, 5, "direct", delivered=True),
            )
            for i in ids
        ]
        await self.pool.adoption.adopt(pairs)
        self.life.pairs.update(ids)

    async def gateways_live(self) -> None:
        for gateway in GATEWAYS:
            await self.pool.gateway_stays(gateway)

    async def gateways_die(self) -> None:
        """So long ago that all queued requests are older."""
        for gateway in GATEWAYS:
            await self.pool.presence.gateway_gone(gateway)
        await self.pool.aged(list(self.life.submissions), 2100)

    def lease(self, batch_id: str) -> tuple[int, int]:
        """When the lease of a batch ends (0: it has none), and the present time, in ms."""
        at, seconds, micros = self.run(self.client.eval(LEASE, 1, self.pool.keys.leases, batch_id))
        return int(at), int(seconds) * 1000 + int(micros) // 1000

    def claims(self, batch_id: str, token: str) -> Awaitable[ClaimedBatch | None]:
        """The call with which a worker claims a batch."""
        return self.pool.batches.claim(batch_id, "w", token)

    def workers_beat(self) -> None:
        """The heartbeats of workers, if they have slots."""

    def let_go(self, some: int) -> Held:
        self.stale.append(self.held.pop(some % len(self.held)))
        return self.stale[-1]

    def verbs(self, batch_id: str, token: str, ids: list[str]) -> dict[str, Callable[[], Awaitable[object]]]:
        batches = self.pool.batches
        return {
            "finish": lambda: batches.finish(batch_id, token, [done(i) for i in ids]),
            "fail": lambda: batches.fail(batch_id, token, ErrorCode.GPU_TIMEOUT, 0),
            "fail late": lambda: batches.fail(batch_id, token, ErrorCode.WORKER_LOST, 2 * LONG_MS),
            "release": lambda: batches.release(batch_id, token),
            "renew": lambda: batches.renew(batch_id, token),
        }

    async def check_replies(self, *, heard: bool) -> None:
        """One reply for each end, published or returned by a call, and all of them stored."""
        own = [i for i in self.life.submissions if i in self.life.ends and i not in self.life.adopted]
        published = await self.published()
        assert Counter(reply.id for reply in published) + self.life.told == Counter(own), "one reply each"
        stored = await self.pool.results.fetch(own)
        assert [r.id for r in stored if r] == own, "all replies are stored"
        for reply in published if heard else []:
            self.answer(reply)

    async def published(self) -> list[Reply]:
        """All messages since the last call."""
        replies: list[Reply] = []
        await self.channel.ping()
        async with asyncio.timeout(10):
            while (message := await self.channel.get_message(timeout=1)) is None or message["type"] != "pong":
                if message and message["type"] == "message":
                    replies += decode_replies(message["data"])
        return replies
