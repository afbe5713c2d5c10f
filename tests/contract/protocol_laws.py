"""The invariants of the queue protocol, checked by a full scan of Redis.

Numbers: I1 known states, I2 membership, I5 audit, I7 retry budgets.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pool import TIERS, Pool
from scheduler.protocol.admission import Submission
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, Record, decode_entry
from scheduler.protocol.batches import RETRY_BUDGET
from scheduler.states import TERMINAL

CUSTOMERS = ("customer", "other")
CROWD = tuple(f"c{number}" for number in range(24))
CLIENT_FAULTS = {"poison_request", "invalid_request", "cancelled"}
"""Failures that stay charged."""

ESTIMATE = 7
"""Tokens that a request reserves of the metered quota of `customer`."""


class Life:
    """The events since the last loss of Redis, for comparison."""

    def __init__(self) -> None:
        self.submissions: dict[str, Submission] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        self.told: Counter[str] = Counter()  # Replies that a call returned instead of a message.
        self.pairs: Counter[str] = Counter()  # Records that a gateway sent again.
        self.adopted: set[str] = set()  # Requests that ended by them.
        self.holders: dict[str, tuple[str, str]] = {}  # Idempotency key -> request, fingerprint.


class Row(NamedTuple):
    """One request."""

    state: str
    code: str
    losses: int
    tier: str
    paid: bool = False
    tokens: int = 0  # What it has of the metered quota: reserved, or settled.
    overdue: bool = False


class Backlogs(NamedTuple):
    """The index of a tier, or of a customer's keys (`<tier>:<customer>`): its members with their weights, the stored number of
    ids and sum of weights.
    """

    listed: dict[str, float]
    waiting: int
    weights: float


class Scan(NamedTuple):
    """The whole state in Redis, read while nothing else runs."""

    rows: dict[str, Row]
    queues: dict[str, list[str]]  # With the backlogs of their customers and keys.
    inflight: dict[str, list[str]]  # "<tier>:<batch>" -> ids
    leases: dict[str, float]
    batches: dict[str, str]  # id -> state
    line: list[str]
    dead: list[str]
    records: list[Record]
    under_way: set[str]  # Requests with a concurrency lease of the customer.
    spent: int  # Requests that count against the customer's quota.
    tokens: int  # What is used of its metered quota.
    followers: dict[str, list[str]]  # Primary -> its followers.
    sharing: list[str]  # Ended primaries with remaining followers.
    lists: dict[str, list[str]]  # "<tier>:<customer>", "<tier>:<customer>:<key>" -> ids
    backlogs: dict[str, Backlogs]

    def runnable(self, tier: str) -> int:
        """How many of its requests wait and may run."""
        return sum(
            self.rows[i].state == "queued" and not self.rows[i].overdue for i in self.queues[tier] if i in self.rows
        )

    def members(self) -> dict[str, list[str]]:
        """Batch -> its ids."""
        found: dict[str, list[str]] = {}
        for key, ids in self.inflight.items():
            found.setdefault(key.partition(":")[2], []).extend(ids)
        return found


EVERYTHING = """
local rows, queues, open, spent, tokens = {}, {}, {}, 0, 0
local function all(pattern, read)
  local found = {}
  for i, key in ipairs(redis.call('KEYS', pattern)) do found[i] = {string.match(key, ':(.*)$'), read(key)} end
  return found
end
local function list(key) return redis.call('LRANGE', key, 0, -1) end
local function used(text) return tonumber(string.match(text or '', ' (%d+)$') or 0) end
for i, id in ipairs(ARGV) do
  rows[i] = redis.call('HMGET', 'request:' .. id, 'state', 'code', 'losses', 'who', 'charged', 'env')
end
for i, tier in ipairs(KEYS) do queues[i] = list('queue:' .. tier) end
local backlogs = all('backlogs:*', function(key)
  local name, weights = string.sub(key, 10), {}
  local members = redis.call('ZRANGE', key, 0, -1)
  for i, member in ipairs(members) do weights[i] = redis.call('HGET', 'flow:' .. name .. ':' .. member, 'weight') or '1' end
  return {members, weights, redis.call('HGET', 'fair:' .. name, 'weights') or '0'}
end)
for _, of_customer in ipairs(all('rl:leases:*', function(key) return redis.call('ZRANGE', key, 0, -1) end)) do
  for _, id in ipairs(of_customer[2]) do open[#open + 1] = id end
end
all('rl:customer:*', function(key)
  spent = spent + used(redis.call('HGET', key, 'q:1year'))
  tokens = tokens + used(redis.call('HGET', key, 'q:1year:tokens'))
end)
return {rows, queues, all('inflight:*', list), redis.call('ZRANGE', 'leases', 0, -1, 'WITHSCORES'),
  all('batch:*', function(key) return redis.call('HGET', key, 'state') end), list('batch_queue'), list('dlq'), list('outbox'),
  open, {spent, tokens}, all('riders:*', list), redis.call('ZRANGE', 'sharing', 0, -1), all('backlog:*', list), backlogs,
  all('waiting:*', function(key) return redis.call('GET', key) end)}
"""
"""One round trip, because it runs after every step."""


async def scan(pool: Pool, ids: Sequence[str]) -> Scan:
    found: list[Any] = await pool.client.eval(EVERYTHING, len(TIERS), *TIERS, *ids)
    rows, queues, inflight, leases, batches, line, dead, outbox, under_way, spent, followers, sharing, *waiting = found
    lists = named_lists(waiting[0])
    return Scan(
        rows={i: row_of(values) for i, values in zip(ids, rows, strict=True)},
        queues={
            tier: texts(queue) + [i for name, own in lists.items() if name.startswith(f"{tier}:") for i in own]
            for tier, queue in zip(TIERS, queues, strict=True)
        },
        inflight=named_lists(inflight),
        leases={batch.decode(): float(at) for batch, at in zip(leases[::2], leases[1::2], strict=True)},
        batches={batch.decode(): state.decode() for batch, state in batches},
        line=texts(line),
        dead=texts(dead),
        records=[record for entry in reversed(outbox) for record in decode_entry(entry)[0]],
        under_way=set(texts(under_way)),
        spent=int(spent[0]),
        tokens=int(spent[1]),
        followers=named_lists(followers),
        sharing=texts(sharing),
        lists=lists,
        backlogs=backlogs_of(*waiting[1:]),
    )


def named_lists(found: list[tuple[bytes, list[bytes]]]) -> dict[str, list[str]]:
    return {name.decode(): texts(ids) for name, ids in found}


def backlogs_of(indexes: list[Any], counts: list[tuple[bytes, bytes]]) -> dict[str, Backlogs]:
    waiting = {name.decode(): int(count) for name, count in counts}
    found = {name: Backlogs({}, count, 0.0) for name, count in waiting.items()}
    for key, (members, weights, total) in indexes:
        listed = dict(zip(texts(members), map(float, weights), strict=True))
        found[key.decode()] = Backlogs(listed, waiting.get(key.decode(), 0), float(total))
    return found


def row_of(values: list[bytes | None]) -> Row:
    state, code, losses, who, charged, env = ((v or b"").decode() for v in values)
    _, _, tier, paid, *_ = who.split(" ") if who else [""] * 4
    metered = re.search(r"1year:tokens:\d+:(\d+)", charged)
    is_paid = paid.removesuffix("+") in {"all", "requests", "listed"}
    is_overdue = "0" * 12 + "1" in env.split(" ")[1:3]
    return Row(state, code, int(losses or 0), tier, is_paid, int(metered[1]) if metered else 0, is_overdue)


def texts(found: list[bytes]) -> list[str]:
    return [text.decode() for text in found]


def check_laws(state: Scan, life: Life) -> None:
    """Check all invariants. Raises AssertionError."""
    check_membership(state)
    check_backlogs(state)
    check_followers(state)
    check_budgets(state)
    check_suspects(state)
    check_audit(state, life)
    check_dead_letters(state)
    check_keys(state, life)
    check_limits(state)


def check_backlogs(state: Scan) -> None:
    """The index and the numbers of a tier agree with the backlogs of its customers, and those of a customer with its keys'."""
    lengths: dict[str, Counter[str]] = {name: Counter() for name in [*TIERS, *state.backlogs]}
    for name, ids in state.lists.items():
        tier, customer, *key = name.split(":")
        lengths[tier][customer] += len(ids)
        if key:
            lengths.setdefault(f"{tier}:{customer}", Counter())[key[0]] += len(ids)
    for name, own in lengths.items():
        listed, waiting, weights = state.backlogs.get(name, Backlogs({}, 0, 0.0))
        assert set(listed) >= set(own), ("a backlog without an entry in the index", name, own, listed)
        assert waiting == own.total(), ("number of waiting ids", name, waiting, own)
        assert weights == sum(listed.values()), ("sum of weights", name, weights, listed)


def check_membership(state: Scan) -> None:
    """I2: a request is in the list of its state, and each batch in flight has a lease."""
    queued = Counter((tier, i) for tier, ids in state.queues.items() for i in ids)
    running = Counter(i for ids in state.inflight.values() for i in ids)
    for i, row in state.rows.items():
        assert row.state in {"queued", "processing", "riding"} | TERMINAL, ("unknown state", i, row.state)
        assert running[i] == (row.state == "processing"), ("inflight", i, row.state, running[i])
        if row.state == "queued":
            assert [queued[t, i] for t in TIERS] == [t == row.tier for t in TIERS], ("not once in its own queue", i)
        if row.state == "processing":
            assert sum(queued[t, i] for t in TIERS) == 0, ("queued and processing", i)
    held = set(state.members())
    assert held <= set(state.leases), ("in flight without a lease", held)
    assert state.batches.keys() == state.leases.keys(), ("a batch without a lease, or the reverse", state.batches)


def check_followers(state: Scan) -> None:
    """A follower has one primary, which has not ended, or whose followers are being ended."""
    waiting = {i for i, row in state.rows.items() if row.state == "riding"}
    on = Counter(i for ids in state.followers.values() for i in ids if i in waiting)
    assert on == Counter(waiting), ("not one primary each", on, waiting)
    for primary, ids in state.followers.items():
        if waiting & set(ids):
            open_ = state.rows[primary].state in {"queued", "processing"}
            assert open_ or primary in state.sharing, ("followers without an end", primary)


def check_budgets(state: Scan) -> None:
    """I7, for each request: at most three attempts."""
    for i, row in state.rows.items():
        assert row.losses <= RETRY_BUDGET + 1, ("losses", i, row.losses)
    for end in state.records:
        assert not isinstance(end, EndedRecord) or 0 <= end.attempts <= RETRY_BUDGET + 1, ("attempts", end)


def check_suspects(state: Scan) -> None:
    """Lost requests are not mixed with new ones, and are alone in their last attempt."""
    for batch, ids in state.members().items():
        losses = {state.rows[i].losses for i in ids}
        assert len(losses) == 1, ("lost requests with others", batch, losses)
        assert max(losses) < RETRY_BUDGET or len(ids) == 1, ("not alone in the last attempt", batch, ids)


def check_limits(state: Scan) -> None:
    """Open requests have a concurrency lease; completed ones and failures caused by the client count against the quota.

    Of the metered quota as much is used as open requests reserve and ended ones cost.
    """
    under_way = {i for i, row in state.rows.items() if row.state and row.state not in TERMINAL}
    assert state.under_way == under_way, ("leases of concurrency", state.under_way ^ under_way)
    charged = [
        row for row in state.rows.values() if row.paid and not (row.state == "failed" and row.code not in CLIENT_FAULTS)
    ]
    assert state.spent == len(charged), ("spent of the quota", state.spent, len(charged))
    assert state.tokens == sum(row.tokens for row in state.rows.values()), ("of the metered quota", state.tokens)
    refunded = {i for i, row in state.rows.items() if row.state == "failed" and row.code not in CLIENT_FAULTS}
    assert not any(state.rows[i].tokens for i in refunded), "a failure of the service costs nothing"
    assert {state.rows[i].tokens for i in under_way} <= {0, ESTIMATE}, "open requests have their estimate"


def check_audit(state: Scan, life: Life) -> None:
    """I5: one accepted record per request, one ended record per end, and those that a gateway sent again."""
    begun = Counter(r.id for r in state.records if isinstance(r, AcceptedRecord))
    ends = [r for r in state.records if isinstance(r, EndedRecord)]
    own = {e.id: (e.state, e.error_code) for e in ends if not e.delivered}
    terminal = {i: (row.state, row.code) for i, row in state.rows.items() if row.state in TERMINAL}
    assert begun == Counter(list(life.submissions)) + life.pairs, "one accepted record each"
    assert Counter(e.id for e in ends if e.delivered) == life.pairs, "records that were sent again are unchanged"
    assert len(own) == sum(not e.delivered for e in ends), "one ended record each"
    assert own == {i: end for i, end in terminal.items() if i not in life.adopted}, "record and row have one state"


def check_dead_letters(state: Scan) -> None:
    """One dead letter, and one id in the list, for each request that failed finally by itself."""
    letters = [r for r in state.records if isinstance(r, DeadLetterRecord)]
    # The dead letter is that of the primary.
    shared = {r.id for r in state.records if isinstance(r, EndedRecord) and r.served_from}
    dead = {i for i, row in state.rows.items() if row.losses > RETRY_BUDGET or row.code == "poison_request"}
    gone = dead - shared
    assert Counter(letter.id for letter in letters) == Counter(gone), "one letter each"
    assert Counter(state.dead) == Counter(gone), "one id each"
    assert all(letter.body != b"\xa0" and letter.worker_ids for letter in letters), "a dead letter is complete"


def check_keys(state: Scan, life: Life) -> None:
    """An idempotency key has one completed request between losses of Redis, and at most one open one."""
    for kind in ("completed", "open"):
        keys = Counter(keys_of(state, life, kind))
        assert all(count == 1 for count in keys.values()), (kind, keys)


def keys_of(state: Scan, life: Life, kind: str) -> Iterator[str]:
    for i, submission in life.submissions.items():
        now = state.rows[i].state if state.rows[i].state in TERMINAL else "open"
        if submission.idempotency and not submission.again and now == kind and i not in life.adopted:
            yield submission.idempotency
