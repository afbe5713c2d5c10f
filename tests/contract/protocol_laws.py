"""What must hold of the queue protocol at every moment, judged by a full scan of Redis: the laws of the model.

The numbers are those of the invariants: I2 membership, I5 audit, I7 budgets. That a request has a known state is I1.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pool import TIERS, Pool
from scheduler.protocol.admission import Submission
from scheduler.protocol.audit_outbox import AcceptedRecord, DeadLetterRecord, EndedRecord, Record, decode_entry
from scheduler.protocol.batches import RETRY_BUDGET
from scheduler.states import TERMINAL

THEIRS = {"poison_request", "invalid_request", "cancelled"}
"""Failures that a client pays for."""


class Life:
    """What happened since Redis was empty last: the other side of the books."""

    def __init__(self) -> None:
        self.submissions: dict[str, Submission] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        self.told: Counter[str] = Counter()  # Replies that a caller got in hand instead of a message.
        self.pairs: Counter[str] = Counter()  # Beginnings and ends that a gateway told again.
        self.adopted: set[str] = set()  # Those among them that ended by it.
        self.holders: dict[str, tuple[str, str]] = {}  # Idempotency key -> request, fingerprint.


class Row(NamedTuple):
    """One request."""

    state: str
    code: str
    losses: int
    tier: str
    paid: bool = False


class Scan(NamedTuple):
    """Everything that Redis holds, read while nothing else runs."""

    rows: dict[str, Row]
    queues: dict[str, list[str]]
    inflight: dict[str, list[str]]  # "<tier>:<batch>" -> ids
    leases: dict[str, float]
    batches: dict[str, str]  # id -> state
    line: list[str]
    dead: list[str]
    records: list[Record]
    under_way: set[str]  # Who holds a lease of the customer's concurrency.
    spent: int  # Of the customer's quota.
    followers: dict[str, list[str]]  # Leader -> who waits for its run.
    sharing: list[str]  # Leaders that have ended, and have not told all of them.

    def members(self) -> dict[str, list[str]]:
        """Batch -> its ids."""
        found: dict[str, list[str]] = {}
        for key, ids in self.inflight.items():
            found.setdefault(key.partition(":")[2], []).extend(ids)
        return found


EVERYTHING = """
local rows, queues, inflight, batches, riders = {}, {}, {}, {}, {}
for i, id in ipairs(ARGV) do rows[i] = redis.call('HMGET', 'request:' .. id, 'state', 'code', 'losses', 'who') end
for i, tier in ipairs(KEYS) do queues[i] = redis.call('LRANGE', 'queue:' .. tier, 0, -1) end
for i, key in ipairs(redis.call('KEYS', 'inflight:*')) do inflight[i] = {key, redis.call('LRANGE', key, 0, -1)} end
for i, key in ipairs(redis.call('KEYS', 'batch:*')) do batches[i] = {key, redis.call('HGET', key, 'state')} end
for i, key in ipairs(redis.call('KEYS', 'riders:*')) do riders[i] = {key, redis.call('LRANGE', key, 0, -1)} end
local leases = redis.call('ZRANGE', 'leases', 0, -1, 'WITHSCORES')
local line, dead = redis.call('LRANGE', 'batch_queue', 0, -1), redis.call('LRANGE', 'dlq', 0, -1)
local quota = redis.call('HGET', 'rl:customer:customer', 'q:1year')
return {rows, queues, inflight, leases, batches, line, dead, redis.call('LRANGE', 'outbox', 0, -1),
  redis.call('ZRANGE', 'rl:leases:customer', 0, -1), string.match(quota or '', ' (%d+)$') or '0',
  riders, redis.call('ZRANGE', 'sharing', 0, -1)}
"""
"""One round trip, since it is made after every step."""


async def scan(pool: Pool, ids: Sequence[str]) -> Scan:
    found: list[Any] = await pool.client.eval(EVERYTHING, len(TIERS), *TIERS, *ids)
    rows, queues, inflight, leases, batches, line, dead, outbox, under_way, spent, followers, sharing = found
    return Scan(
        rows={i: row_of(values) for i, values in zip(ids, rows, strict=True)},
        queues={tier: texts(queue) for tier, queue in zip(TIERS, queues, strict=True)},
        inflight={key.decode().removeprefix("inflight:"): texts(members) for key, members in inflight},
        leases={batch.decode(): float(at) for batch, at in zip(leases[::2], leases[1::2], strict=True)},
        batches={key.decode().removeprefix("batch:"): state.decode() for key, state in batches},
        line=texts(line),
        dead=texts(dead),
        records=[record for entry in reversed(outbox) for record in decode_entry(entry)[0]],
        under_way=set(texts(under_way)),
        spent=int(spent),
        followers={key.decode().removeprefix("riders:"): texts(ids) for key, ids in followers},
        sharing=texts(sharing),
    )


def row_of(values: list[bytes | None]) -> Row:
    state, code, losses, who = ((v or b"").decode() for v in values)
    _, _, tier, paid, *_ = who.split(" ") if who else [""] * 4
    return Row(state, code, int(losses or 0), tier, paid.removesuffix("+") in {"all", "requests"})


def texts(found: list[bytes]) -> list[str]:
    return [text.decode() for text in found]


def check_laws(seen: Scan, life: Life) -> None:
    """All of them. Raises AssertionError."""
    check_membership(seen)
    check_riders(seen)
    check_budgets(seen)
    check_suspects(seen)
    check_audit(seen, life)
    check_dead_letters(seen)
    check_keys(seen, life)
    check_limits(seen)


def check_membership(seen: Scan) -> None:
    """I2: where a request stands is what its state says, and whoever is in flight has a lease."""
    queued = Counter((tier, i) for tier, ids in seen.queues.items() for i in ids)
    running = Counter(i for ids in seen.inflight.values() for i in ids)
    for i, row in seen.rows.items():
        assert row.state in {"queued", "processing", "riding"} | TERMINAL, ("unknown state", i, row.state)
        assert running[i] == (row.state == "processing"), ("inflight", i, row.state, running[i])
        if row.state == "queued":
            assert [queued[t, i] for t in TIERS] == [t == row.tier for t in TIERS], ("not once in its own queue", i)
        if row.state == "processing":
            assert sum(queued[t, i] for t in TIERS) == 0, ("queued and processing", i)
    held = set(seen.members())
    assert held <= set(seen.leases), ("in flight without a lease", held)
    assert seen.batches.keys() == seen.leases.keys(), ("a batch without a lease, or the reverse", seen.batches)


def check_riders(seen: Scan) -> None:
    """Who rides does so on one run, which is still to end, or whose riders are being told."""
    riding = {i for i, row in seen.rows.items() if row.state == "riding"}
    on = Counter(i for ids in seen.followers.values() for i in ids if i in riding)
    assert on == Counter(riding), ("not on one run each", on, riding)
    for leader, ids in seen.followers.items():
        if riding & set(ids):
            open_ = seen.rows[leader].state in {"queued", "processing"}
            assert open_ or leader in seen.sharing, ("nobody will end them", leader, seen.rows[leader].state)


def check_budgets(seen: Scan) -> None:
    """I7, for each request: three attempts and no more."""
    for i, row in seen.rows.items():
        assert row.losses <= RETRY_BUDGET + 1, ("losses", i, row.losses)
    for end in seen.records:
        assert not isinstance(end, EndedRecord) or 0 <= end.attempts <= RETRY_BUDGET + 1, ("attempts", end)


def check_suspects(seen: Scan) -> None:
    """What was lost is never mixed with fresh work, and is alone in its last attempt."""
    for batch, ids in seen.members().items():
        losses = {seen.rows[i].losses for i in ids}
        assert len(losses) == 1, ("lost ones among others", batch, losses)
        assert max(losses) < RETRY_BUDGET or len(ids) == 1, ("not alone in the last attempt", batch, ids)


def check_limits(seen: Scan) -> None:
    """Who is under way counts as that and nobody else; who ran, or gave up by itself, has paid, and nobody else."""
    under_way = {i for i, row in seen.rows.items() if row.state and row.state not in TERMINAL}
    assert seen.under_way == under_way, ("leases of concurrency", seen.under_way ^ under_way)
    charged = [row for row in seen.rows.values() if row.paid and not (row.state == "failed" and row.code not in THEIRS)]
    assert seen.spent == len(charged), ("spent of the quota", seen.spent, len(charged))


def check_audit(seen: Scan, life: Life) -> None:
    """I5: a beginning for each accepted request and an end for each that ended, and those that a gateway told again."""
    begun = Counter(r.id for r in seen.records if isinstance(r, AcceptedRecord))
    ends = [r for r in seen.records if isinstance(r, EndedRecord)]
    own = {e.id: (e.state, e.error_code) for e in ends if not e.delivered}
    terminal = {i: (row.state, row.code) for i, row in seen.rows.items() if row.state in TERMINAL}
    assert begun == Counter(list(life.submissions)) + life.pairs, "one accepted record each"
    assert Counter(e.id for e in ends if e.delivered) == life.pairs, "what was told again is there as it is"
    assert len(own) == sum(not e.delivered for e in ends), "one ended record each"
    assert own == {i: end for i, end in terminal.items() if i not in life.adopted}, "it says what the state says"


def check_dead_letters(seen: Scan) -> None:
    """One letter, and one id in the list, for each request that was given up for good."""
    letters = [r for r in seen.records if isinstance(r, DeadLetterRecord)]
    shared = {
        r.id for r in seen.records if isinstance(r, EndedRecord) and r.served_from
    }  # The leader's letter tells of them.
    dead = {i for i, row in seen.rows.items() if row.losses > RETRY_BUDGET or row.code == "poison_request"}
    gone = dead - shared
    assert Counter(letter.id for letter in letters) == Counter(gone), "one letter each"
    assert Counter(seen.dead) == Counter(gone), "one id each"
    assert all(letter.body != b"\xa0" and letter.worker_ids for letter in letters), "a letter tells all"


def check_keys(seen: Scan, life: Life) -> None:
    """An idempotency key leads to one completed request in one life of Redis, and has one open at a time."""
    for state in ("completed", "open"):
        keys = Counter(keys_of(seen, life, state))
        assert all(count == 1 for count in keys.values()), (state, keys)


def keys_of(seen: Scan, life: Life, state: str) -> Iterator[str]:
    for i, submission in life.submissions.items():
        now = seen.rows[i].state if seen.rows[i].state in TERMINAL else "open"
        if submission.idempotency and not submission.again and now == state and i not in life.adopted:
            yield submission.idempotency
