"""The queue protocol under random histories: Hypothesis drives the real Lua, and a full scan judges every step.

A history mixes living, dead, slow and confused workers, gateways that come and go, lost replies and retried calls. What
must hold at every moment is `check_laws`; then everything is healed and drained, and each accepted request must have
come to exactly one end. Seeded bugs in the scripts show that the laws have teeth.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import scheduler.scripts
from key_leaks import leaked_keys
from pool import TIERS, Pool, done
from scheduler.admission import Submission
from scheduler.batches import LEASE_MS, RETRY_BUDGET, Outcome
from scheduler.connections import command_client, subscriber_client
from scheduler.errors import ErrorCode
from scheduler.keys import Keys
from scheduler.replies import decode_replies
from scheduler.states import TERMINAL, Admission
from tierlane.embedded.redis_server import EmbeddedRedis

T = TypeVar("T")
LONG_MS = 600_000  # Time passes only where a rule says so.
ANY = st.integers(0, 1000)  # Which one: an index, taken modulo what is there.
OFTEN = st.sampled_from((True, True, True, False))
CODES = (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NO_CAPACITY)


class Held(NamedTuple):
    """What a worker believes to hold."""

    batch_id: str
    token: str
    ids: list[str]

    def outcomes(self, kept: int, failed: int) -> list[Outcome]:
        """Of the first `kept` members; the first `failed` of them are the model's errors."""
        bad = [Outcome(i, "poison_request", 9.5, 0, "v1", "") for i in self.ids[:failed]]
        return (bad + [done(i) for i in self.ids[failed:]])[:kept]


class Scan(NamedTuple):
    """Everything that Redis holds, read while nothing else runs."""

    rows: dict[str, list[str]]  # id -> state, code, tries, losses, tier
    queues: dict[str, list[str]]
    inflight: dict[str, list[str]]  # "<tier>:<batch>" -> ids
    leases: dict[str, float]
    batches: set[str]
    line: list[str]


async def scan(pool: Pool, ids: Sequence[str]) -> Scan:
    pipeline = pool.client.pipeline()
    for i in ids:
        pipeline.hmget(pool.keys.request(i), "state", "code", "tries", "losses", "tier")
    rows = [[(v or b"").decode() for v in row] for row in await pipeline.execute()] if ids else []
    return Scan(
        rows=dict(zip(ids, rows, strict=True)),
        queues={t: [i.decode() for i in await pool.client.lrange(pool.keys.queue(t), 0, -1)] for t in TIERS},
        inflight={key.removeprefix("inflight:"): members for key, members in (await pool.inflight()).items()},
        leases={b.decode(): at for b, at in await pool.client.zrange(pool.keys.leases, 0, -1, withscores=True)},
        batches={key.decode().removeprefix("batch:") for key in await pool.client.keys("batch:*")},
        line=[b.decode() for b in await pool.client.lrange(pool.keys.batch_queue, 0, -1)],
    )


def check_laws(seen: Scan) -> None:
    """I2 membership and I7 budget; that every id has a known state is I1."""
    queued = Counter((tier, i) for tier, ids in seen.queues.items() for i in ids)
    running = Counter(i for ids in seen.inflight.values() for i in ids)
    for i, (state, _, tries, losses, tier) in seen.rows.items():
        assert state in {"queued", "processing"} | TERMINAL, ("unknown state", i, state)
        assert running[i] == (state == "processing"), ("inflight", i, state, running[i])
        if state == "queued":
            assert [queued[t, i] for t in TIERS] == [t == tier for t in TIERS], ("not once in its own queue", i)
        if state == "processing":
            assert sum(queued[t, i] for t in TIERS) == 0, ("queued and processing", i)
        assert 0 <= int(tries or 0) <= RETRY_BUDGET + 1, ("attempts", i, tries)
        assert int(losses or 0) <= RETRY_BUDGET + 1, ("losses", i, losses)
    held = {key.partition(":")[2] for key in seen.inflight}
    assert held <= set(seen.leases), ("in flight without a lease", held)
    assert seen.batches == set(seen.leases), ("a batch without a lease, or the reverse", seen.batches)


class Protocol(RuleBasedStateMachine):
    """One pool in the hands of many. Worker `w` may be any worker: only tokens tell them apart."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client, self.listener = command_client(self.url), subscriber_client(self.url)
        self.run(self.client.flushall())
        self.pool = Pool(self.client, Keys())
        self.channel = self.listener.pubsub()
        self.run(self.channel.subscribe(self.pool.keys.responses("g1")))
        self.submissions: dict[str, Submission] = {}
        self.popped: list[str] = []
        self.held: list[Held] = []
        self.stale: list[Held] = []  # Dead, slow, or done already: they may come back with it.
        self.ends: dict[str, tuple[str, str]] = {}
        self.told: Counter[str] = Counter()  # Replies that a caller got in hand instead of a message.
        self.number = 0

    def run(self, call: Awaitable[T]) -> T:
        async def called() -> T:
            return await call

        return self.runner.run(called())

    def scan(self) -> Scan:
        return self.run(scan(self.pool, list(self.submissions)))

    def unchanged(self, call: Callable[[], Awaitable[T]]) -> T:
        before = self.scan().rows
        result = self.run(call())
        assert self.scan().rows == before, "a call that has no right to changed a request"
        return result

    def pick(self, some: int) -> str:
        return list(self.submissions)[some % len(self.submissions)]

    @initialize(counts=st.lists(st.integers(1, 3), max_size=3))
    def a_busy_pool(self, counts: list[int]) -> None:
        for tier, count in zip(TIERS, counts, strict=False):
            self.take(tier, count, late=False)

    # Gateways

    @rule(tier=st.sampled_from(TIERS), count=st.integers(1, 3))
    def submit(self, tier: str, count: int) -> None:
        fresh = [self.pool.submission(tier, total_ms=LONG_MS, queue_ms=LONG_MS) for _ in range(count)]
        assert {v.outcome for v in self.run(self.pool.admit(fresh))} == {Admission.ACCEPTED}
        self.submissions |= {s.id: s for s in fresh}

    @precondition(lambda self: self.submissions)
    @rule(some=ANY)
    def submit_again(self, some: int) -> None:
        again = self.submissions[self.pick(some)]
        (verdict,) = self.unchanged(lambda: self.pool.admit([again]))
        assert verdict.outcome == Admission.DUPLICATE

    @precondition(lambda self: self.submissions)
    @rule(some=st.lists(ANY, min_size=1, max_size=3), code=st.sampled_from(CODES))
    def cancel(self, some: list[int], code: ErrorCode) -> None:
        ids = list(dict.fromkeys(self.pick(i) for i in some))
        before = {i: row[0] for i, row in self.scan().rows.items()}
        for i, reply in zip(ids, self.run(self.pool.endings.cancel([(i, code) for i in ids])), strict=True):
            left_running = before[i] == "processing" and code is ErrorCode.CANCELLED
            assert (reply is None) == left_running
            self.told[i] += before[i] not in TERMINAL and not left_running

    # Schedulers

    @rule(counts=st.tuples(*[st.integers(0, 3)] * len(TIERS)), lookahead=st.integers(1, 4), owner=OFTEN)
    def form(self, counts: tuple[int, ...], lookahead: int, *, owner: bool) -> None:
        """`owner`: whether the gateway of all these lives."""
        self.run(self.pool.gateway_lives("g1") if owner else self.pool.presence.gateway_gone("g1"))
        self.run(self.pool.form([(t, n) for t, n in zip(TIERS, counts, strict=True) if n], lookahead))

    @rule(reaped=OFTEN)
    def leases_run_out(self, *, reaped: bool) -> None:
        self.run(self.pool.expire_leases())
        if not reaped:
            return
        before = self.scan()
        state_of = {b: self.run(self.client.hget(self.pool.keys.batch(b), "state")) for b in before.leases}
        self.run(self.client.delete(self.pool.keys.reaped_at))  # However slow this machine is, no pass came late.
        self.run(self.pool.endings.reap(0))
        after = self.scan()
        for batch_id, at in before.leases.items():
            if (
                at == 1 and state_of[batch_id] == b"formed" and batch_id in after.leases
            ):  # else its members ran out of time
                assert after.line.count(batch_id) == max(1, before.line.count(batch_id)), ("pushed wrongly", batch_id)

    @precondition(lambda self: self.submissions)
    @rule(some=ANY, field=st.sampled_from(("qdl", "dl")), seen=st.booleans())
    def time_is_up(self, some: int, field: str, *, seen: bool) -> None:
        self.run(self.pool.overdue([self.pick(some)], field))
        if seen:
            self.run(self.pool.endings.expire(TIERS))

    # Workers

    @rule(dies=st.booleans())
    def pop(self, *, dies: bool) -> None:
        batch_id = self.run(self.pool.pop())
        if batch_id and not dies:
            self.popped.append(batch_id)

    @precondition(lambda self: self.popped)
    @rule(some=ANY, reply=st.sampled_from(("comes", "is lost", "is lost and undone")))
    def claim(self, some: int, reply: str) -> None:
        batch_id = self.popped.pop(some % len(self.popped))
        self.number += 1
        token = f"t{self.number}"
        claimed = self.run(self.pool.batches.claim(batch_id, "w", token))
        if reply == "is lost and undone":
            if not self.run(self.pool.batches.release(batch_id, token)):
                self.run(self.pool.batches.push_back(batch_id))
        elif claimed and claimed.requests:
            held = Held(batch_id, token, [r.id for r in claimed.requests])
            (self.held if reply == "comes" else self.stale).append(held)
            self.lease_is_fresh(batch_id)

    def lease_is_fresh(self, batch_id: str) -> None:
        seconds, micros = self.run(self.client.time())
        left_ms = self.scan().leases[batch_id] - (seconds * 1000 + micros // 1000)
        assert 0 < left_ms <= LEASE_MS, ("the lease was not moved on", batch_id, left_ms)

    @rule(tier=st.sampled_from(TIERS), count=st.integers(1, 3), late=st.booleans())
    def take(self, tier: str, count: int, *, late: bool) -> None:
        """The plain way into a worker's hands."""
        self.submit(tier, count)
        self.form((count,) * len(TIERS), 100, owner=True)
        if late:  # No reaper has come by yet.
            self.leases_run_out(reaped=False)
        self.pop(dies=False)
        if self.popped:
            self.claim(len(self.popped) - 1, "comes")

    @precondition(lambda self: self.popped)
    @rule(some=ANY, times=st.integers(1, 2))
    def push_back(self, some: int, times: int) -> None:
        batch_id = self.popped.pop(some % len(self.popped))
        for _ in range(times):
            self.unchanged(lambda: self.pool.batches.push_back(batch_id))

    @precondition(lambda self: self.held)
    @rule(some=ANY, kept=st.integers(0, 9), failed=st.integers(0, 2), again=st.booleans())
    def finish(self, some: int, kept: int, failed: int, *, again: bool) -> None:
        held = self.let_go(some)
        finish, outcomes = self.pool.batches.finish, held.outcomes(kept, failed)
        assert self.unchanged(lambda: finish(held.batch_id, "foreign", outcomes)) == len(outcomes)
        self.run(finish(held.batch_id, held.token, outcomes))
        if again:  # Its reply was lost.
            assert self.unchanged(lambda: finish(held.batch_id, held.token, outcomes)) == len(outcomes)

    @precondition(lambda self: self.held)
    @rule(some=ANY, verb=st.sampled_from(("dies", "fail", "fail late", "release")))
    def let_go_by(self, some: int, verb: str) -> None:
        batch_id, token, ids = self.let_go(some)
        if verb != "dies":
            self.run(self.verbs(batch_id, token, ids)[verb]())

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

    @precondition(lambda self: self.stale or self.held)
    @rule(some=ANY, verb=st.sampled_from(("finish", "finish", "fail", "fail late", "release", "renew")), guess=OFTEN)
    def come_back(self, some: int, verb: str, *, guess: bool) -> None:
        """A worker wakes up and goes on with what it once held, or somebody guesses a token."""
        known = self.held if guess and self.held else self.stale + self.held
        batch_id, token, ids = known[some % len(known)]
        call = self.verbs(batch_id, "guessed" if guess else token, ids)[verb]
        row = self.run(self.client.hmget(self.pool.keys.batch(batch_id), "state", "token"))
        if row == [b"running", token.encode()] and not guess:
            self.run(call())
        else:
            assert self.unchanged(call) in {False, len(ids)}

    @precondition(lambda self: self.submissions)
    @rule(times=st.integers(1, 4))
    def poison(self, times: int) -> None:
        """Whatever runs kills its worker, again and again: a chain too long to be met by chance."""
        self.form((3, 3, 3), 100, owner=True)
        for _ in range(times):
            while batch_id := self.run(self.pool.pop()):
                self.popped.append(batch_id)
                self.claim(len(self.popped) - 1, "is lost")
            self.leases_run_out(reaped=True)

    # Judgement

    @invariant()
    def laws(self) -> None:
        seen = self.scan()
        check_laws(seen)
        self.run(self.check_audit(seen))
        for i, row in seen.rows.items():
            if row[0] in TERMINAL:
                assert self.ends.setdefault(i, (row[0], row[1])) == (row[0], row[1]), ("a second end", i)
            else:
                assert i not in self.ends, ("rose from the dead", i)

    async def check_audit(self, seen: Scan) -> None:
        accepted, ended = await self.pool.audit()
        assert [a.id for a in accepted] == list(self.submissions), "one accepted record each"
        terminal = {i: (row[0], row[1]) for i, row in seen.rows.items() if row[0] in TERMINAL}
        assert len(ended) == len(terminal), "one ended record each"
        assert {e.id: (e.state, e.error_code) for e in ended} == terminal, "the audit says what the state says"

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            for closing in (self.channel.aclose(), self.listener.aclose(), self.client.aclose()):
                self.run(closing)
            self.runner.close()

    def drain(self) -> None:
        """Heal, serve what is left, and judge the whole history."""
        assert self.run(leaked_keys(self.client)) == []
        for _ in range(RETRY_BUDGET + 2):
            while any(self.run(self.pool.depth(tier)) for tier in TIERS):
                self.form((9, 9, 9), 1000, owner=True)
            self.leases_run_out(reaped=True)
            while batch_id := self.run(self.pool.pop()):
                self.popped = [batch_id]
                self.claim(0, "comes")
                while self.held:
                    self.finish(0, len(self.held[0].ids), 0, again=False)
        self.laws()
        seen = self.scan()
        assert set(self.ends) == set(self.submissions), "not answered"
        assert [*seen.inflight, *seen.leases, *seen.batches, *seen.line] == [], "left behind"
        assert self.run(self.replies()) == Counter(list(self.submissions)), "one reply each"
        assert self.run(leaked_keys(self.client)) == []

    async def replies(self) -> Counter[str]:
        """Every reply that anybody was given: published ones, and those that `cancel` returned first."""
        await self.channel.ping()
        given = self.told.copy()
        async with asyncio.timeout(10):
            while (message := await self.channel.get_message(timeout=1)) is None or message["type"] != "pong":
                if message and message["type"] == "message":
                    given.update(reply.id for reply in decode_replies(message["data"]))
        stored = await self.pool.results.fetch(list(self.submissions))
        assert [r.id for r in stored if r] == list(self.submissions), "the stored reply is the truth"
        return +given


QUIET = list(HealthCheck)
SEARCH = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET
)


def search(server: EmbeddedRedis, how: settings) -> None:
    run_state_machine_as_test(type("Protocol", (Protocol,), {"url": server.url}), settings=how)


def test_every_history_ends_well(redis_server: EmbeddedRedis) -> None:
    """Whatever comes when: the laws hold after every step, and each accepted request has one end, one record, one reply."""
    search(redis_server, SEARCH)


BUGS = {
    "finish_without_token": ("finish", " or batch.token ~= ARGV[3]", ""),
    "claim_without_lease": ("claim", "lease(batch, tonumber(ARGV[5]))", ""),
    "reap_pushes_unseen": ("reap", "if redis.call('LPOS', P .. 'batch_queue', id) then", "if false then"),
    "retry_without_budget": ("reap", "budget = tonumber(ARGV[3])", "budget = 99"),
    "end_without_compare": ("cancel", "row[STATE] == 'queued' or (", "true or ("),
    "release_forgets_the_batch": ("release", "drop_batch(batch)\nwake()", "wake()"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """The laws have teeth: each of these scripts, wrong in one place, breaks one of them."""
    name, right, wrong = BUGS[bug]
    true_source = scheduler.scripts.source
    assert true_source(name).count(right) == 1

    def source(asked: str) -> str:
        return true_source(asked).replace(right, wrong) if asked == name else true_source(asked)

    monkeypatch.setattr(scheduler.scripts, "source", source)

    with pytest.raises(AssertionError):
        search(redis_server, settings(SEARCH, max_examples=400, phases=[Phase.generate]))  # It ends where it finds.
