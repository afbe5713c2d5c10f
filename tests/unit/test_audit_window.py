"""The auditor's window: what it reads of its takes, what it holds, and what it lets go."""

from typing import Any

from integration.auditor_bench import accepted, dead, ended, new_ids
from ledger.audit_rows import Folded
from ledger.audit_window import Window
from scheduler.audit import Record, encode_records


class Redis:
    """The own list of an auditor, its window, and a clock."""

    def __init__(self, hold_s: float = 1.0) -> None:
        self.now = 100.0
        self.window = Window(hold_s, lambda: self.now)
        self.own: list[bytes] = []

    def add(self, *records: Record) -> None:
        self.own.append(encode_records(list(records)))

    async def read(self, **how: Any) -> Folded:
        return await self.window.read(list(self.own), **how)

    def drop(self) -> tuple[int, list[bytes]]:
        count, bad = self.window.written()
        self.window.dropped(count)
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
    """At the end, and while more waits than is taken: what is held would take its room."""
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
    """What had begun in them is written, for it may be known nowhere else; whatever is there counts as new."""
    one, two, new = new_ids(3)
    for left in ([], [encode_records([accepted(new), ended(new)])], [encode_records([accepted(two)])]):
        redis = Redis()
        redis.add(accepted(one))
        redis.add(accepted(two))
        await redis.read()
        redis.own = list(left)

        folded = await redis.read()

        assert {one, two} <= set(folded.accepted)
        await redis.read(hold=False)
        assert redis.drop() == (len(left), [])


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
