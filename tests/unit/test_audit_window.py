"""The auditor's window: what it reads of its takes, what it holds, and what it lets go."""

from integration.auditor_bench import accepted, dead, ended, new_ids
from ledger.audit.rows import Folded
from ledger.audit.window import HoldPolicy, OutboxWindow
from scheduler.protocol.audit_outbox import Record, Taken, encode_records, name_of


class Redis:
    """The own list of an auditor, its window, and a clock."""

    def __init__(self, limit: int = 100, **policy: float) -> None:
        self.now = 100.0
        self.limit = limit
        self.window = OutboxWindow(HoldPolicy(**policy), lambda: self.now)
        self.own: list[bytes] = []
        self.dropped: list[bytes] = []

    def add(self, *records: Record) -> None:
        self.own.append(encode_records(list(records)))

    async def read(self, *, hold: bool = True) -> Folded:
        held, newest = self.window.held()
        if held and (held > len(self.own) or name_of(self.own[held - 1]) != newest):
            return await self.window.read(Taken(0, [], more=True), hold=hold)
        entries = self.own[held : held + self.limit]
        return await self.window.read(Taken(held, entries, len(entries) == self.limit), hold=hold)

    def drop(self) -> tuple[int, list[bytes]]:
        count, oldest, bad = self.window.written()
        assert oldest == (name_of(self.own[0]) if self.own else "") or not count
        self.window.dropped(count)
        self.dropped += self.own[:count]
        del self.own[:count]
        return count, bad


def ids_of(folded: Folded) -> tuple[list[str], list[str]]:
    return sorted(folded.accepted), sorted(folded.ended)


async def test_what_is_whole_is_read_and_dropped_at_once() -> None:
    """Nothing is held that has an end."""
    redis = Redis()
    first, second = new_ids(2)
    redis.add(accepted(first), accepted(second))
    redis.add(ended(first), ended(second), dead(second))

    folded = await redis.read()

    assert ids_of(folded) == ([first, second], [first, second])
    assert list(folded.letters) == [second]
    assert redis.drop() == (2, [])
    assert len(redis.window) == 0
    assert not await redis.read()


async def test_what_has_only_begun_waits_for_its_end() -> None:
    """It is one row then; its entry stays taken so long, and all behind it, and nothing of them is read twice."""
    redis = Redis()
    whole, waiting = new_ids(2)
    redis.add(ended(whole))
    redis.add(accepted(waiting), accepted(whole))

    assert ids_of(await redis.read()) == ([whole], [whole])
    assert redis.drop() == (1, [])
    assert not await redis.read()
    redis.now += 0.9
    redis.add(ended(waiting))

    assert ids_of(await redis.read()) == ([waiting], [waiting])
    assert redis.drop() == (2, [])


async def test_a_beginning_waits_no_longer_than_it_may() -> None:
    """Then it is written open, and its end alone later."""
    redis = Redis(hold_s=1.0)
    old, young = new_ids(2)
    redis.add(accepted(old))
    await redis.read()
    redis.now += 0.6
    redis.add(accepted(young))
    await redis.read()
    redis.now += 0.5

    assert ids_of(await redis.read()) == ([old], [])
    assert redis.drop() == (1, [])
    redis.add(ended(old))
    assert ids_of(await redis.read()) == ([], [old])
    assert redis.drop() == (0, [])  # the young one is before it
    redis.now += 0.6
    assert ids_of(await redis.read()) == ([young], [])
    assert redis.drop() == (2, [])


async def test_without_holding_all_is_read() -> None:
    """At the end: nothing is left for the next auditor."""
    redis = Redis()
    held, new = new_ids(2)
    redis.add(accepted(held))
    assert not await redis.read()
    redis.add(accepted(new))

    assert ids_of(await redis.read(hold=False)) == ([held, new], [])
    assert redis.drop() == (2, [])


async def test_of_two_beginnings_the_first_stands_across_takes() -> None:
    """As within one."""
    redis = Redis()
    (request_id,) = new_ids(1)
    redis.add(accepted(request_id))
    await redis.read()
    redis.add(accepted(request_id, tier="free"), ended(request_id))

    folded = await redis.read()

    assert folded.accepted == {request_id: accepted(request_id)}
    assert redis.drop() == (2, [])
    assert not await redis.read()


async def test_what_was_forgotten_is_read_again() -> None:
    """Where it is not known what was written, all of it is written again."""
    redis = Redis()
    whole, waiting = new_ids(2)
    redis.add(accepted(waiting), accepted(whole), ended(whole))
    assert ids_of(await redis.read()) == ([whole], [whole])

    redis.window.forget()

    redis.add(ended(waiting))
    assert ids_of(await redis.read()) == (sorted([waiting, whole]), sorted([waiting, whole]))
    assert redis.drop() == (2, [])


async def test_entries_that_redis_has_lost() -> None:
    """What had begun in them is written, for it may be known nowhere else; whatever is there is read as new then."""
    one, two, new = new_ids(3)
    for left in ([], [encode_records([accepted(new), ended(new)])], [encode_records([accepted(two)])]):
        redis = Redis()
        redis.add(accepted(one))
        redis.add(accepted(two))
        await redis.read()
        redis.own = list(left)

        folded = await redis.read()

        assert ids_of(folded) == (sorted([one, two]), [])
        assert len(redis.window) == 0
        await redis.read(hold=False)
        assert redis.drop() == (len(left), [])


async def test_where_many_are_open_they_wait_for_longer() -> None:
    """As a deep queue does, in order: each is one row, written once. At the end of it the last ones are let go."""
    ids = new_ids(40)
    redis = Redis(hold_s=1.0, deep_s=60.0, deep_open=10)
    for request_id in ids:
        redis.add(accepted(request_id))
    await redis.read()
    for request_id in ids[:30]:
        redis.now += 1.5
        redis.add(ended(request_id))
        assert ids_of(await redis.read()) == ([request_id], [request_id])
        assert redis.drop()[0] == 1

    redis.add(ended(ids[30]))
    assert ids_of(await redis.read()) == (ids[30:], [ids[30]])  # Nine are not many.
    assert redis.drop() == (41, [])


async def test_nothing_waits_for_longer_than_the_longest() -> None:
    """Requests that nobody will end get their row, and with it somebody who closes it."""
    ids = new_ids(40)
    redis = Redis(hold_s=1.0, deep_s=60.0, deep_open=10)
    for request_id in ids:
        redis.add(accepted(request_id))
    await redis.read()
    redis.now += 59.9
    assert not await redis.read()
    redis.now += 0.1
    assert ids_of(await redis.read()) == (ids, [])


async def test_a_slow_request_does_not_keep_the_rest() -> None:
    """It is let go once it keeps twice what is open, though many are."""
    slow, *ids = new_ids(100)
    redis = Redis(hold_s=1.0, deep_s=60.0, deep_open=10)
    redis.add(accepted(slow))
    for request_id in ids[:20]:
        redis.add(accepted(request_id))
    await redis.read()
    redis.now += 2
    kept = []
    for begins, ends in zip(ids[20:], ids, strict=False):
        redis.add(accepted(begins), ended(ends))
        folded = await redis.read()
        kept.append(len(redis.own))
        assert folded.accepted.keys() - {slow} == {ends}
        redis.drop()

    assert max(kept) < 45
    assert encode_records([accepted(slow)]) in redis.dropped


async def test_bad_records_go_with_their_entry() -> None:
    """They are set aside when it is dropped, so that after a crash none is set aside twice; so are refused rows."""
    redis = Redis()
    waiting, whole = new_ids(2)
    redis.add(accepted(waiting))
    redis.own.append(b"\xc1")
    redis.add(accepted(whole), ended(whole))
    await redis.read()
    redis.window.set_aside([b"refused"])
    assert redis.drop() == (0, [])

    redis.add(ended(waiting))
    await redis.read()

    assert redis.drop() == (4, [b"\xc1", b"refused"])
    redis.own.append(b"\xc1")
    await redis.read()
    assert redis.drop() == (1, [b"\xc1"])
