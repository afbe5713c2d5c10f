"""Random histories of a pool whose workers have slots: the rules of `protocol_machine.py`, and those of requests that start and end
one by one.

The model knows what runs in each worker. The free slots in Redis agree with it, except of a worker whose last claim or end was
not reported.
"""

from collections.abc import Awaitable, Sequence

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from contract.protocol_laws import Scan
from contract.protocol_machine import ANY, OFTEN, Protocol
from contract.protocol_world import Held
from contract.slots import announce, stored_slots
from pool import TIERS, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import (
    HANDED_BACK,
    WITHDRAWN,
    ClaimedBatch,
    FreeSlots,
    MemberEnd,
    OwnedBatch,
    lost,
)
from scheduler.protocol.cancellation import Cancellation

SLOTS = {"w1": 4, "w2": 2}
WORKERS = st.sampled_from(sorted(SLOTS))
LOST, HUNG = lost(ErrorCode.WORKER_LOST), lost(ErrorCode.GPU_TIMEOUT)
RETURNS = (HANDED_BACK, WITHDRAWN, LOST, HUNG)
FINAL = ("", "", "", "cancelled", "invalid_output", "poison_request")
ENDS = st.lists(st.tuples(ANY, st.sampled_from(FINAL + RETURNS)), min_size=1, max_size=6)


class SlotProtocol(Protocol):
    """Two workers, whose batches are distinguished by their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, str] = {}  # Token -> worker.
        self.members: dict[str, Held] = {}  # Token -> the batch as it was claimed.
        self.unreported: set[str] = set()  # Workers that run other requests than Redis counts.
        self.draining: set[str] = set()
        self.left: set[str] = set()  # Requests whose clients left while they ran.
        self.withdrawn: set[str] = set()
        self.workers_beat()

    # What a worker does

    def runs(self, worker: str) -> list[tuple[str, str]]:
        """The requests in its slots, each with the token of its batch."""
        return [(held.token, i) for held in self.held if self.owners[held.token] == worker for i in held.ids]

    def free(self, worker: str) -> int:
        return SLOTS[worker] - len(self.runs(worker))

    def workers_beat(self) -> None:
        """All of them; after a loss of Redis nothing is marked any more."""
        self.left.clear()
        self.withdrawn.clear()
        for worker in SLOTS:
            self.beats(worker, drains=False)

    @rule(worker=WORKERS, drains=st.sampled_from((False, False, True)))
    def beats(self, worker: str, *, drains: bool) -> None:
        """It drains, or can start requests."""
        self.run(announce(self.pool, worker, self.free(worker), SLOTS[worker], "draining" if drains else "ready"))
        self.unreported.discard(worker)
        (self.draining.add if drains else self.draining.discard)(worker)

    def claims(self, batch_id: str, token: str) -> Awaitable[ClaimedBatch | None]:
        return self.claim_for(batch_id, token, sorted(SLOTS)[self.number % len(SLOTS)])

    async def claim_for(self, batch_id: str, token: str, worker: str) -> ClaimedBatch | None:
        """The worker counts what it claimed only if the reply comes; until then its slots are not reported."""
        self.owners[token] = worker
        claimed = await self.pool.batches.claim(batch_id, worker, token, FreeSlots(self.free(worker), SLOTS[worker]))
        if claimed is None:
            return None
        self.unreported.add(worker)
        self.members[token] = Held(batch_id, token, [r.id for r in claimed.requests])
        assert not self.left & {r.id for r in claimed.requests}, "a request without a client runs again"
        for request in claimed.requests:
            assert request.was_withdrawn == (request.id in self.withdrawn), "withdrawn more than once"
        return claimed

    @rule(some=ANY, reply=st.just("comes"))
    @precondition(lambda self: self.popped)
    def claim_and_count(self, some: int, reply: str) -> None:
        """After a claim whose reply came, Redis counts exactly what runs."""
        count = len(self.held)
        self.claim(some, reply)
        if len(self.held) > count:
            self.unreported.discard(self.owners[self.held[-1].token])

    def let_go(self, some: int) -> Held:
        held = super().let_go(some)
        self.unreported.add(self.owners[held.token])
        return held

    @precondition(lambda self: self.held)
    @rule(worker=WORKERS, picks=ENDS, known=OFTEN, again=st.booleans())
    def end_some(self, worker: str, picks: list[tuple[int, str]], *, known: bool, again: bool) -> None:
        """Any of its requests end in one call, whatever their batches. `known`: no claim is in progress."""
        runs = self.runs(worker)
        codes = {runs[at % len(runs)]: code for at, code in picks} if runs else {}
        if codes:
            self.end_all(worker, codes, known=known, again=again)

    @precondition(lambda self: any(len(held.ids) > 1 for held in self.held))
    @rule(some=ANY, code=st.sampled_from(RETURNS))
    def one_of_several_returns(self, some: int, code: str) -> None:
        """The others of its batch still run when the same end comes again."""
        several = [held for held in self.held if len(held.ids) > 1]
        held = several[some % len(several)]
        self.end_all(
            self.owners[held.token], {(held.token, held.ids[some % len(held.ids)]): code}, known=True, again=True
        )

    def owns(self, token: str) -> bool:
        """Whether its batch was not lost, and retried under the same id, meanwhile."""
        key = self.pool.keys.batch(self.members[token].batch_id)
        return bool(self.run(self.client.hget(key, "token")) == token.encode())

    def end_all(self, worker: str, codes: dict[tuple[str, str], str], *, known: bool, again: bool) -> None:
        self.run(self.client.delete(self.pool.keys.retry_budget))  # It is full.
        before, total = self.scan(), SLOTS[worker]
        owned = {token for token, _ in codes if self.owns(token)}
        ends = [ended(self.members[token], i, code) for (token, i), code in codes.items()]
        foreign = [end._replace(batch=OwnedBatch(end.batch.id, "foreign")) for end in ends]
        part, now_free = self.pool.batches.finish_part, FreeSlots(self.free(worker), total)
        if known:
            assert self.unchanged(lambda: part(worker, foreign, now_free)) == len(ends)
        for token, i in codes:
            self.has_ended(token, i)
        slots = FreeSlots(self.free(worker) if known else None, total)
        stale = self.run(part(worker, ends, slots))
        self.unreported -= {worker} if known else set()
        members = before.members()
        valid = {
            i: code
            for (token, i), code in codes.items()
            if token in owned and i in members.get(self.members[token].batch_id, [])
        }
        assert stale == len(ends) - len(valid), "stale outcomes"
        self.check_ends(valid)
        after = self.scan()
        ended_batches = {self.members[token].batch_id for token in owned}
        assert all(after.members().get(batch) for batch in ended_batches & after.batches.keys()), "an empty batch stays"
        if again and known:  # Its reply was lost.
            assert self.unchanged(lambda: part(worker, ends, slots)) == len(ends)

    def has_ended(self, token: str, request_id: str) -> None:
        """The worker does not run it any more."""
        (at,) = (n for n, held in enumerate(self.held) if held.token == token)
        held = self.held[at]
        self.held[at] = held._replace(ids=[i for i in held.ids if i != request_id])
        if not self.held[at].ids:
            del self.held[at]
            self.stale.append(self.members[token])

    def check_ends(self, codes: dict[str, str]) -> None:
        """The state of each request afterwards."""
        rows = self.scan().rows
        for i, code in codes.items():
            row = rows[i]
            if code in FINAL:
                assert (row.state, row.code) == ("failed" if code else "completed", code)
            elif i in self.left:
                assert (row.state, row.code, row.losses <= 2) == ("failed", "cancelled", True), "a left run goes on"
            elif code in (HANDED_BACK, WITHDRAWN):
                assert row.state == ("processing" if row.losses else "queued"), "not handed back"
                self.withdrawn |= {i} if code == WITHDRAWN else set()
            else:
                assert row.losses > 0, "a loss is not counted"

    @rule(worker=WORKERS)
    def restarts(self, worker: str) -> None:
        """What ran in it is lost, and it can start others at once."""
        while (mine := [n for n, held in enumerate(self.held) if self.owners[held.token] == worker]) != []:
            self.let_go(mine[0])
        self.beats(worker, drains=False)

    @rule(worker=WORKERS, ends=st.booleans())
    def reads_its_signals(self, worker: str, *, ends: bool) -> None:
        """They name requests that this worker ran; it ends those that still run."""
        codes: dict[tuple[str, str], str] = {}
        while (packed := self.run(self.client.lpop(self.pool.keys.stops(worker)))) is not None:
            for i in msgspec.msgpack.decode(packed):
                codes |= {run: "cancelled" for run in self.runs(worker) if run[1] == i}
        if codes and ends:
            self.end_all(worker, codes, known=True, again=False)

    @precondition(lambda self: self.stale)
    @rule(some=ANY, code=st.sampled_from(FINAL + RETURNS))
    def comes_back_with_a_part(self, some: int, code: str) -> None:
        """A worker that was suspended ends a request of a batch that it lost, unless it owns that batch still."""
        held = self.stale[some % len(self.stale)]
        row = self.run(self.client.hmget(self.pool.keys.batch(held.batch_id), "state", "token"))
        if row == [b"running", held.token.encode()] or self.owners.get(held.token) is None:
            return
        worker = self.owners[held.token]
        slots = FreeSlots(self.free(worker), SLOTS[worker])
        call = [ended(held, held.ids[some % len(held.ids)], code)]
        assert self.unchanged(lambda: self.pool.batches.finish_part(worker, call, slots)) == 1
        self.unreported.discard(worker)

    # Clients and schedulers

    @precondition(lambda self: self.life.submissions)
    @rule(some=ANY, used=st.integers(0, 9))
    def a_stream_is_left(self, some: int, used: int) -> None:
        self.cancelled([Cancellation(self.pick(some), ErrorCode.CANCELLED, running=True, used=used)])

    @precondition(lambda self: self.held)
    @rule(some=ANY, running=st.booleans())
    def a_running_one_is_left(self, some: int, *, running: bool) -> None:
        ids = [i for held in self.held for i in held.ids if i in self.life.submissions]
        if ids:
            self.cancelled([Cancellation(ids[some % len(ids)], ErrorCode.CANCELLED, running=running)])

    def runs_on(self, call: Cancellation, state: Scan) -> bool:
        """It is only marked in a slot. One that others may share, or with a key, goes on; so does one of a claimed batch without slots."""
        submission = self.life.submissions[call.id]
        if submission.same or (submission.idempotency and not call.running):
            return not call.running
        (batch,) = (batch for batch, ids in state.members().items() if call.id in ids)
        if not self.has_slots(batch):
            return not call.running
        if state.batches[batch] == "formed":
            return False
        self.left.add(call.id)
        return True

    def has_slots(self, batch_id: str) -> bool:
        """Not if it was formed while all workers drained, or for a follower of a lost request."""
        return bool(self.run(self.client.hexists(self.pool.keys.batch(batch_id), "slots")))

    def formed(self, picks: Sequence[tuple[str, int]], lookahead: int, *, owner: bool) -> None:
        room = self.run(self.pool.batches.look(TIERS)).slots
        if room is None:
            super().formed(picks, lookahead, owner=owner)
            return
        before = self.scan()
        batch_id = self.run(self.pool.form(picks, lookahead))
        size = int(self.run(self.client.hget(self.pool.keys.batch(batch_id), "size")) or 0)
        assert size <= min(room.free, room.fewest), ("more than are free", size, room)
        if owner and room.free and not size:
            after = self.scan()
            assert not any(before.runnable(tier) for tier, _ in picks) or sum(map(len, after.queues.values())) < sum(
                map(len, before.queues.values())
            ), "left idle"

    @invariant()
    def slots_agree(self) -> None:
        """Free slots in Redis and running requests are all slots of a worker; batches wait for a claim as long as they are ready."""
        stored = self.run(stored_slots(self.pool))
        assert set(stored) == set(SLOTS) - self.draining, "workers that can start requests"
        for worker, (free, total) in stored.items():
            if worker not in self.unreported:
                assert (free + len(self.runs(worker)), total) == (SLOTS[worker],) * 2, ("slots drift", worker, stored)
        unclaimed = {name.decode() for name in self.run(self.client.hkeys(self.pool.keys.prefix + "unclaimed"))}
        formed = {batch for batch, state in self.scan().batches.items() if state == "formed"}
        assert unclaimed == {*filter(self.has_slots, formed)}, ("batches that wait for a claim", unclaimed, formed)

    # The end

    def serve_all(self) -> None:
        for worker in SLOTS:
            self.restarts(worker)
        self.leases_run_out(reaped=True)
        while any(self.run(self.pool.depth(tier)) for tier in TIERS) or self.run(
            self.client.llen(self.pool.keys.batch_queue)
        ):
            self.form((9, 9, 9), 1000, owner=True)
            while batch_id := self.run(self.pool.pop()):
                self.popped = [batch_id]
                self.claim_and_count(0, "comes")
            for worker in SLOTS:
                if codes := dict.fromkeys(self.runs(worker), ""):
                    self.end_all(worker, codes, known=True, again=False)
        self.leases_run_out(reaped=True)


def ended(held: Held, request_id: str, code: str) -> MemberEnd:
    """One end; a run that was stopped had used tokens, others that failed had delivered nothing."""
    outcome = done(request_id)._replace(error_code=code, cost_ms=3.0)
    return MemberEnd(
        OwnedBatch(held.batch_id, held.token),
        outcome if not code else outcome._replace(output="", tokens_used=2 * (code == "cancelled")),
    )
