"""Random histories of the queue protocol: Hypothesis runs the real scripts with lost, slow and faulty workers, gateways that
are lost, clients that retry, lost replies, and a Redis that loses its data.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from configs import LEASE_MS
from contract.protocol_laws import CROWD, CUSTOMERS, ESTIMATE, Life, Scan, check_laws
from contract.protocol_world import GATEWAYS, LONG_MS, Held, World
from key_leaks import leaked_keys
from pool import TIERS
from ratelimit.quotas import Meter
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import TierLimit
from scheduler.protocol.batches import RETRY_BUDGET
from scheduler.protocol.cancellation import Cancellation
from scheduler.protocol.followers import Followers
from scheduler.protocol.replies import decode_reply
from scheduler.states import TERMINAL, Admission

ANY = st.integers(0, 1000)  # An index, modulo the number of elements.
FEW = st.integers(1, 4)
STORIES = ("is lifted, and left", "is lost too late", "ends well")
OFTEN = st.sampled_from((True, True, True, False))
REPLIES = st.sampled_from(("comes", "comes", "is lost", "is lost and undone"))
CHAINS = (("fail", "release", "fail", "fail"), ("dies",) * 4, ("fail",) * 4, ("dies", "release", "fail", "dies"))
CODES = (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NO_CAPACITY)
QUOTA, METERED = ("1year", 1_000_000), ("1year:tokens", 1_000_000)
UNMETERED = {"total_ms": LONG_MS, "queue_ms": LONG_MS, "max_concurrency": 1000, "tokens": ESTIMATE, "quotas": [QUOTA]}
LIMITS = UNMETERED | {"quotas": [QUOTA, METERED], "meter": Meter()}
WEIGHTS = st.sampled_from((0.0, 3.0))
SIZES = st.lists(st.integers(1, 4), max_size=24)
SHUT = [TierLimit(name, 0.0, 0.0, 0, TIERS, 0, 0) for name in TIERS]


def weights_of(number: int, turn: int) -> dict[str, Any]:
    """The weight of a customer of the crowd, and of the key of its n-th request: every third customer has two such keys."""
    key = f"key{turn % 2}" if number % 3 == 0 else "key"
    return {"weight": (1.0, 2.0, 0.5, 4.0)[number % 4], "api_key_id": key, "key_weight": 3.0 if key != "key" else 0.0}


class Protocol(World):
    """The rules, in any order."""

    @initialize(counts=st.lists(st.integers(1, 3), max_size=3))
    def a_busy_pool(self, counts: list[int]) -> None:
        for tier, count in zip(TIERS, counts, strict=False):
            self.take(tier, count, late=False)

    # Gateways

    @rule(tier=st.sampled_from(TIERS), count=st.integers(1, 3), customer=st.sampled_from(CUSTOMERS))
    def submit(self, tier: str, count: int, customer: str = CUSTOMERS[0]) -> None:
        own = LIMITS if customer == "customer" else UNMETERED
        fresh = [self.pool.submission(tier, **own, customer_id=customer) for _ in range(count)]
        assert {v.outcome for v in self.run(self.pool.admit(fresh))} == {Admission.ACCEPTED}
        self.enter(fresh)

    @precondition(lambda self: self.crowds < 2)
    @rule(tier=st.sampled_from(TIERS), counts=st.lists(st.integers(1, 3), min_size=8, max_size=len(CROWD)), sizes=SIZES)
    def a_crowd(self, tier: str, counts: list[int], sizes: list[int]) -> None:
        """Few requests each of many customers, some of them with keys of a weight; then batches of some of them."""
        self.crowds += 1
        fresh = [
            self.pool.submission(tier, **UNMETERED, **weights_of(number, turn), customer_id=customer)
            for number, (customer, count) in enumerate(zip(CROWD, counts, strict=False))
            for turn in range(count)
        ]
        assert {v.outcome for v in self.run(self.pool.admit(fresh))} == {Admission.ACCEPTED}
        self.enter(fresh)
        for size in sizes:
            self.form([size * (name == tier) for name in TIERS], 1000, owner=True)

    @precondition(lambda self: self.life.submissions)
    @rule(some=ANY, lost=st.booleans())
    def submit_again(self, some: int, *, lost: bool) -> None:
        """The reply of admit was lost, or its gateway assumes that Redis lost the request."""
        again = msgspec.structs.replace(self.life.submissions[self.pick(some)], again=lost)
        (verdict,) = self.unchanged(lambda: self.pool.admit([again]))
        assert verdict.outcome == Admission.DUPLICATE

    @rule(
        key=st.sampled_from("ab"), body=st.sampled_from("xxxy"), at=st.sampled_from(GATEWAYS), times=st.integers(1, 2)
    )
    def submit_with_key(self, key: str, body: str, at: str, times: int) -> None:
        """A client retries with its key, also through another gateway, or twice in one call."""
        fresh = [self.pool.submission(**LIMITS, idempotency=key, fingerprint=body) for _ in range(times)]
        for submission, verdict in zip(fresh, self.run(self.pool.admit(fresh, gateway=at)), strict=True):
            assert (verdict.outcome, verdict.stored_id) == self.expected(key, body)
            if verdict.outcome == Admission.ACCEPTED:
                self.enter([submission])

    @rule(
        tier=st.sampled_from(TIERS),
        same=st.sampled_from("pq"),
        keep_ms=st.sampled_from((0, 0, LONG_MS)),
        count=FEW,
        weight=WEIGHTS,
    )
    def submit_same(self, tier: str, same: str, keep_ms: int, count: int, weight: float = 0.0) -> None:
        """Equal requests share a run or a cached result. `weight`: of their key."""
        share = {"same": same, "keep_answer_ms": keep_ms, "model_version": "v1", "key_weight": weight}
        fresh = [self.pool.submission(tier, **LIMITS, **share) for _ in range(count)]
        verdicts = self.run(self.pool.admit(fresh))
        assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
        self.enter(fresh)
        for submission, verdict in zip(fresh, verdicts, strict=True):
            if verdict.reply:
                self.life.told[submission.id] += 1
                self.answer(decode_reply(verdict.reply))

    @rule(
        same=st.sampled_from("pq"),
        keep_ms=st.sampled_from((0, LONG_MS)),
        how=st.sampled_from(STORIES),
        weight=WEIGHTS,
        ahead=st.booleans(),
    )
    def a_shared_run(self, same: str, keep_ms: int, how: str, weight: float, *, ahead: bool) -> None:
        """Equal requests, and the end of their primary. `ahead`: others have the places in the tier queue."""
        if ahead:
            self.submit("free", 2)
        self.submit_same("free", same, keep_ms, 1 if how == "is lifted, and left" else 3, weight)
        if how == "is lifted, and left":
            self.submit_same("paid", same, keep_ms, 1)
            self.cancel([-1], ErrorCode.CANCELLED)
            return
        self.form((9, 9, 9), 1000, owner=True)
        self.pop(dies=False)
        if self.popped:
            self.claim(len(self.popped) - 1, "comes")
        if how == "is lost too late" and self.held:
            self.run(self.pool.overdue(self.held[-1].ids[:1], "dl"))
            self.let_go_by(len(self.held) - 1, "fail")
        elif self.held:
            self.finish(len(self.held) - 1, 9, 0, again=False)
            self.submit_same("free", same, keep_ms, 1)

    @rule()
    def share(self) -> None:
        self.run(Followers(self.client, self.pool.keys).share())

    @precondition(lambda self: self.life.submissions)
    @rule(some=st.lists(ANY, min_size=1, max_size=3), code=st.sampled_from(CODES))
    def cancel(self, some: list[int], code: ErrorCode) -> None:
        ids = list(dict.fromkeys(self.pick(i) for i in some))
        self.cancelled([Cancellation(i, code) for i in ids])

    def cancelled(self, calls: Sequence[Cancellation]) -> None:
        state = self.scan()
        for call, reply in zip(calls, self.run(self.pool.terminations.cancel(calls)), strict=True):
            before = state.rows[call.id].state
            runs_on = before == "processing" and call.code is ErrorCode.CANCELLED and self.runs_on(call, state)
            assert (reply is None) == (runs_on or call.id in self.life.adopted)
            self.life.told[call.id] += before not in TERMINAL and not runs_on
            self.answer(reply)

    def runs_on(self, call: Cancellation, _: Scan) -> bool:
        """Whether a request of a batch goes on although its client has left."""
        return not call.running

    @precondition(lambda self: self.life.submissions and len(self.life.pairs) < 3)
    @rule(some=ANY)
    def answer_past_redis(self, some: int) -> None:
        """A request ended in direct mode while Redis was unavailable; its gateway sends the result now."""
        i = self.pick(some)
        self.answered.setdefault(i, ("completed", ""))
        before = self.scan().rows
        if before[i].state in TERMINAL:
            self.unchanged(lambda: self.adopt([i]))
        else:
            self.run(self.adopt([i]))
            self.life.adopted.add(i)
            now = self.scan().rows
            assert (now[i].state, now[i].code) == self.answered[i]

    @precondition(lambda self: self.losses < 2)
    @rule(heard=st.booleans(), late=st.booleans())
    def redis_comes_back_empty(self, *, heard: bool, late: bool) -> None:
        """Gateways resubmit pending requests and send recent results; workers still have batches that Redis does not know.

        `heard`: whether the last messages were received. `late`: a client with a key is faster than its gateway.
        """
        self.losses += 1
        self.run(self.check_replies(heard=heard))
        self.run(self.client.flushall())
        self.run(self.gateways_live())
        pending = [s for i, s in self.life.submissions.items() if i not in self.answered]
        self.life = Life()
        self.stale, self.held = self.stale + self.held, []
        if late:
            self.submit_with_key("a", "x", "g2", 1)
        lost = [msgspec.structs.replace(s, again=True) for s in pending]
        assert {v.outcome for v in self.run(self.pool.admit(lost, SHUT))} <= {Admission.ACCEPTED}
        self.enter(lost)
        self.run(self.adopt(list(self.answered)))
        self.workers_beat()

    # Schedulers

    @rule(counts=st.tuples(*[st.integers(0, 3)] * len(TIERS)), lookahead=st.integers(1, 4), owner=OFTEN)
    def form(self, counts: Sequence[int], lookahead: int, *, owner: bool) -> None:
        """`owner`: whether the gateways of all requests run, or have been lost for some time.

        A request that waits leaves: there is a batch, unless enough are ready or too many ended requests are first.
        """
        if not owner:
            self.run(self.gateways_die())
        self.formed([(t, n) for t, n in zip(TIERS, counts, strict=True) if n], lookahead, owner=owner)
        if not owner:
            self.run(self.gateways_live())

    def formed(self, picks: Sequence[tuple[str, int]], lookahead: int, *, owner: bool) -> None:
        before = self.scan()
        batch_id = self.run(self.pool.form(picks, lookahead))
        if owner and len(before.line) < lookahead:
            waiting = {t: before.runnable(t) for t, n in picks if len(before.queues[t]) - before.runnable(t) <= 3 * n}
            formed = any(waiting.values()) and self.run(self.client.exists(self.pool.keys.batch(batch_id)))
            assert formed or not any(waiting.values()), ("left idle", waiting)

    @rule(reaped=OFTEN)
    def leases_run_out(self, *, reaped: bool) -> None:
        self.run(self.pool.expire_leases())
        if not reaped:
            return
        self.run(self.client.delete(self.pool.keys.retry_budget))  # The retry budget is full.
        before = self.scan()
        self.run(self.pool.reaped())  # However slow this machine is, no pass counts as late.
        after = self.scan()
        for batch_id, state in before.batches.items():
            if state == "formed" and batch_id in after.leases:  # otherwise its members passed their deadlines
                assert after.line.count(batch_id) == max(1, before.line.count(batch_id)), ("pushed wrongly", batch_id)

    @precondition(lambda self: self.life.submissions)
    @rule(some=ANY, field=st.sampled_from(("qdl", "dl")), seen=st.booleans(), everyone=st.booleans())
    def time_is_up(self, some: int, field: str, *, seen: bool, everyone: bool) -> None:
        """Of one request, or of all, as when the clock of Redis goes forwards."""
        self.run(self.pool.overdue(list(self.life.submissions) if everyone else [self.pick(some)], field))
        if seen:
            self.run(self.pool.terminations.expire(TIERS))

    @precondition(lambda self: not self.waves)
    @rule(balance=st.integers(0, 3))
    def a_wave_of_losses(self, balance: int) -> None:
        """Many losses at once with a small retry budget: I7, over all requests."""
        self.waves += 1
        for tier in TIERS:
            self.take(tier, 2, late=False)
        before, later_us = (
            self.scan().rows,
            (self.lease("")[1] + LONG_MS) * 1000,
        )  # Nothing is deposited before that time.
        self.run(self.client.hset(self.pool.keys.retry_budget, mapping={"tokens": balance, "at": later_us}))
        self.run(self.client.pexpire(self.pool.keys.retry_budget, 60_000))
        self.run(self.pool.reaped())
        after = self.scan().rows
        retried = sum(row.state == "processing" and row.losses > before[i].losses for i, row in after.items())
        assert retried <= balance, ("more than the retry budget", retried, balance)
        # It grows by ten retries per second, so that later retries would depend on the speed of this machine.
        self.run(self.client.delete(self.pool.keys.retry_budget))

    # Workers

    @rule(dies=st.booleans())
    def pop(self, *, dies: bool) -> None:
        batch_id = self.run(self.pool.pop())
        if batch_id and not dies:
            self.popped.append(batch_id)

    @precondition(lambda self: self.popped)
    @rule(some=ANY, reply=REPLIES)
    def claim(self, some: int, reply: str) -> None:
        batch_id = self.popped.pop(some % len(self.popped))
        self.number += 1
        token, called_ms = f"t{self.number}", self.after_the_lease(batch_id)
        claimed = self.run(self.claims(batch_id, token))
        if reply == "is lost and undone":
            if not self.run(self.pool.batches.release(batch_id, token)):
                self.run(self.pool.batches.push_back(batch_id))
        elif claimed and claimed.requests:
            held = Held(batch_id, token, [r.id for r in claimed.requests])
            (self.held if reply == "comes" else self.stale).append(held)
            self.lease_is_fresh(batch_id, called_ms)

    def after_the_lease(self, batch_id: str) -> int:
        """A millisecond after the lease of the batch began, so that an old lease does not pass for a new one."""
        at, now_ms = self.lease(batch_id)
        while at and now_ms <= at - LEASE_MS:
            at, now_ms = self.lease(batch_id)
        return now_ms

    def lease_is_fresh(self, batch_id: str, called_ms: int) -> None:
        at, now_ms = self.lease(batch_id)
        assert called_ms <= at - LEASE_MS <= now_ms, ("the lease was not renewed", batch_id, at)

    @rule(tier=st.sampled_from(TIERS), count=st.integers(1, 3), late=st.booleans(), reply=REPLIES, leaves=OFTEN)
    def take(self, tier: str, count: int, *, late: bool, reply: str = "comes", leaves: bool = False) -> None:
        """Requests from admission to a claim; then the last client leaves."""
        self.submit(tier, count)
        self.form((count,) * len(TIERS), 100, owner=True)
        if late:  # No reaper pass yet.
            self.leases_run_out(reaped=False)
        self.pop(dies=False)
        if self.popped:
            self.claim(len(self.popped) - 1, reply)
        if leaves:
            self.cancel([-1], ErrorCode.CANCELLED)

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
        self.run(self.client.delete(self.pool.keys.retry_budget))
        batch_id, token, ids = self.let_go(some)
        if verb != "dies":
            self.run(self.verbs(batch_id, token, ids)[verb]())

    @precondition(lambda self: self.stale or self.held)
    @rule(some=ANY, verb=st.sampled_from(("finish", "finish", "fail", "fail late", "release", "renew")), guess=OFTEN)
    def come_back(self, some: int, verb: str, *, guess: bool) -> None:
        """A suspended worker continues with an old batch, or a caller guesses a token."""
        known = self.held if guess and self.held else self.stale + self.held
        batch_id, token, ids = known[some % len(known)]
        call = self.verbs(batch_id, "guessed" if guess else token, ids)[verb]
        row = self.run(self.client.hmget(self.pool.keys.batch(batch_id), "state", "token"))
        if row == [b"running", token.encode()] and not guess:
            self.run(call())
        else:
            assert self.unchanged(call) in {False, len(ids)}

    @precondition(lambda self: self.life.submissions and not self.poisons)
    @rule(verbs=st.sampled_from(CHAINS))
    def poison(self, verbs: tuple[str, ...]) -> None:
        """All running batches are lost or released repeatedly, a chain that random rules rarely make."""
        self.poisons += 1
        for verb in verbs:
            self.submit("free", 1)
            self.form((3, 3, 3), 100, owner=True)
            while batch_id := self.run(self.pool.pop()):
                self.popped.append(batch_id)
                self.claim(len(self.popped) - 1, "comes")
            self.laws()
            while self.held:
                self.let_go_by(0, verb)
            self.leases_run_out(reaped=True)

    # Invariants

    @invariant()
    def laws(self) -> None:
        state = self.scan()
        check_laws(state, self.life)
        for i, row in state.rows.items():
            if row.state in TERMINAL:
                assert self.life.ends.setdefault(i, (row.state, row.code)) == (row.state, row.code), ("a second end", i)
            else:
                assert i not in self.life.ends, ("open again after its end", i)

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            for closing in (self.channel.aclose(), self.listener.aclose(), self.client.aclose()):
                self.run(closing)
            self.runner.close()

    def serve_all(self) -> None:
        """Run what is queued or in a batch."""
        while any(self.run(self.pool.depth(tier)) for tier in TIERS):
            self.form((9, 9, 9), 1000, owner=True)
        self.leases_run_out(reaped=True)
        while batch_id := self.run(self.pool.pop()):
            self.popped = [batch_id]
            self.claim(0, "comes")
            while self.held:
                self.finish(0, len(self.held[0].ids), 0, again=False)

    def drain(self) -> None:
        """Serve all remaining requests, and check the whole history."""
        assert self.run(leaked_keys(self.client)) == []
        for _ in range(RETRY_BUDGET + 2):
            self.run(Followers(self.client, self.pool.keys).share_all())
            self.serve_all()
        self.laws()
        state = self.scan()
        assert set(self.life.ends) == set(self.life.submissions), "without an end"
        assert self.accepted == set(self.answered) | set(self.life.ends), "a request was lost"
        assert [*state.inflight, *state.leases, *state.batches, *state.line] == [], "left behind"
        self.run(self.check_replies(heard=True))
        assert self.accepted == set(self.answered), "a client without a response"
        assert self.run(leaked_keys(self.client)) == []
