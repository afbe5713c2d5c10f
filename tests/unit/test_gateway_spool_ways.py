"""Into the spool in groups, and out of it into Redis: who is called back when, and what is told twice after a failure."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eventually import eventually
from gateway.direct import spool_tasks
from gateway.direct.spool import Spool, SpoolError, to_line
from gateway.direct.spool_tasks import CALL_SIZE, PAIR_BYTES, RETRY_S, SpoolMerge, SpoolWriter
from gateway.inference.recovery import Pair, SpoolEntry
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from scheduler.tasks import end_all


def pair(number: int) -> Pair:
    request_id = f"req_{number:032x}"
    return (
        AcceptedRecord(request_id, "customer", "key", "free", "tiny", "gw-1", 5, ""),
        EndedRecord(request_id, "completed", "", 1000 + number, 12.5, 1.0, 2.0, "", 3, "w1", 1, 5, 5, "direct", True),
    )


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    made = ThreadPoolExecutor(1)
    yield made
    made.shutdown()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path, "gw-1", 1 << 20)
    made.open()
    yield made
    made.close()


async def test_what_comes_during_a_write_goes_together(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """One write for the first, one for all that came meanwhile; nobody is told before his pair is on the disk."""
    writer = SpoolWriter(spool, thread)
    task = asyncio.create_task(writer.run())
    told: list[tuple[int, bool, int]] = []
    for number in range(20):
        writer.add(pair(number), lambda safe, number=number: told.append((number, safe, spool.bytes)))  # type: ignore[misc]
        if number == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert told == []
    await eventually(lambda: len(told) == 20, "all are told")
    await end_all([task])

    assert [(number, safe) for number, safe, _ in told] == [(number, True) for number in range(20)]
    assert writer.groups == 2
    assert min(size for _, _, size in told) > 0


async def test_one_callback_s_fault_costs_nobody_else_an_answer(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """It is logged, and the others of its group are told."""
    writer, told = SpoolWriter(spool, thread), []

    def broken(safe: bool) -> None:
        raise RuntimeError

    writer.add(pair(1), broken)
    writer.add(pair(2), told.append)
    await writer.flush()
    assert told == [True]


async def test_a_refusing_disk_refuses_at_the_door_for_a_second(
    spool: Spool, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then one group tries again, and where it is safe the trouble is over."""
    now = [0.0]
    writer, told = SpoolWriter(spool, thread, clock=lambda: now[0]), []

    def refuse(notes: Sequence[SpoolEntry], reserve: int) -> None:
        raise SpoolError("The spool cannot be written: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "append", refuse)
        writer.add(pair(1), told.append)
        await writer.flush()
    assert (told, writer.rejecting, writer.rejected) == ([False], True, 1)
    assert writer.problem == "The spool cannot be written: No space left on device."
    now[0] = RETRY_S
    assert not writer.rejecting
    writer.add(pair(2), told.append)
    await writer.flush()
    assert (told, writer.problem) == ([False, True], None)


def begun(number: int) -> SpoolEntry:
    return pair(number)[0], None


async def test_what_began_has_room_to_end(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    """A full spool takes no beginning and no end of what never began; of what began it takes the end, in the same group."""
    spool = Spool(tmp_path, "gw-1", 5 * PAIR_BYTES)
    spool.open()
    writer, told = SpoolWriter(spool, thread), list[tuple[str, bool]]()
    for number in range(10):
        writer.add(begun(number), lambda safe, name=f"begun {number}": told.append((name, safe)))  # type: ignore[misc]
        await writer.flush()
    taken = [name for name, safe in told if safe]
    assert taken == [f"begun {number}" for number in range(len(taken))]
    assert 0 < len(taken) < 5
    told.clear()
    for number in range(len(taken)):
        writer.add(pair(number), lambda safe, name=f"end {number}": told.append((name, safe)))  # type: ignore[misc]
    writer.add(begun(20), lambda safe: told.append(("begun 20", safe)))
    for number in range(30, 60):
        writer.add(pair(number), lambda safe: told.append(("never began", safe)))
    await writer.flush()

    assert told[: len(taken)] == [(f"end {number}", True) for number in range(len(taken))]
    assert told[len(taken) :] == [("begun 20", False), *[("never began", False)] * 30]
    assert writer.problem is not None
    assert writer.problem.startswith("The spool is full")
    assert writer.rejecting
    assert spool.bytes == sum(len(to_line(begun(n))) + len(to_line(pair(n))) for n in range(len(taken)))
    assert spool.reserved == 0
    spool.close()


async def test_an_end_that_goes_another_way_needs_no_room(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """Released, be it while another group is on its way, its room is free again, and is not kept by the next group."""
    writer, told = SpoolWriter(spool, thread), list[bool]()
    writer.add(begun(1), told.append)
    await writer.flush()
    assert spool.reserved == PAIR_BYTES
    writer.add(begun(2), told.append)
    writing = asyncio.create_task(writer.flush())
    await asyncio.sleep(0)
    writer.release(begun(1)[0].id)
    await writing
    writer.release(begun(2)[0].id)

    assert told == [True, True]
    assert spool.reserved == 0


class Redis:
    """Adopts, and is away from the n-th call on if told so."""

    def __init__(self) -> None:
        self.adopted: list[list[SpoolEntry]] = []
        self.away_from: int | None = None

    async def adopt(self, pairs: Sequence[SpoolEntry]) -> int:
        if self.away_from is not None and len(self.adopted) >= self.away_from:
            raise RedisUnavailable("away")
        self.adopted.append(list(pairs))
        return 0


async def test_a_merge_that_breaks_off_goes_on_where_it_was(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """At most 256 a call; the file goes only after its last pair; what Redis was told is remembered."""
    redis, remembered = Redis(), list[Pair]()
    merge = SpoolMerge(spool, thread, redis, redis_available=lambda: True, remember=remembered.extend)
    pairs = [pair(number) for number in range(CALL_SIZE * 2 + 10)]
    spool.append(pairs)
    redis.away_from = 1
    with pytest.raises(RedisUnavailable):
        await merge.merge()
    assert (len(spool.to_merge()), len(remembered)) == (1, CALL_SIZE)
    spool.append([pair(9999)])
    redis.away_from = None
    await merge.merge()

    assert [len(call) for call in redis.adopted] == [CALL_SIZE, CALL_SIZE, 10, 1]
    assert [each for call in redis.adopted for each in call] == [*pairs, pair(9999)] == remembered
    assert (spool.to_merge(), spool.bytes) == ([], 0)


async def test_a_beginning_is_told_alone_where_its_end_is_not_there(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """Under way while its file is merged, its pair goes with the next file; a pair repeats the beginning beside it."""
    redis, remembered = Redis(), list[Pair]()
    merge = SpoolMerge(spool, thread, redis, redis_available=lambda: True, remember=remembered.extend)
    spool.append([begun(1), begun(2)])
    spool.append([pair(1)])
    await merge.merge()
    spool.append([pair(2)])
    await merge.merge()

    assert redis.adopted == [[begun(2), pair(1)], [pair(2)]]
    assert remembered == [pair(1), pair(2)]
    assert spool.bytes == 0


async def test_nothing_is_merged_while_redis_is_away(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """The loop waits for the breaker, and begins by itself."""
    redis, answers = Redis(), [False]
    merge = SpoolMerge(spool, thread, redis, redis_available=lambda: answers[0], remember=lambda _: None)
    spool.append([pair(1)])
    task = asyncio.create_task(merge.run())
    await asyncio.sleep(0.25)
    assert redis.adopted == []
    answers[0] = True
    await eventually(lambda: spool.bytes == 0, "it is merged")
    await end_all([task])
    assert redis.adopted == [[pair(1)]]


async def test_a_fault_does_not_end_the_loop(
    spool: Spool, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read now is tried again."""
    monkeypatch.setattr("gateway.direct.spool_tasks.RETRY_S", 0.01)
    redis = Redis()
    merge = SpoolMerge(spool, thread, redis, redis_available=lambda: True, remember=lambda _: None)
    spool.append([pair(1)])
    read, faults = spool.read, iter([PermissionError(13, "Permission denied")])

    def read_at_second(path: Path, offset: int, most: int) -> object:
        for fault in faults:
            raise fault
        return read(path, offset, most)

    monkeypatch.setattr(spool, "read", read_at_second)
    task = asyncio.create_task(merge.run())
    await eventually(lambda: spool.bytes == 0, "it is merged")
    await end_all([task])
    assert redis.adopted == [[pair(1)]]


def left_of_tries(directory: Path) -> list[Path]:
    return list(directory.glob("*.try"))


def refusing(spool: Spool, kind: str) -> Callable[[], None]:
    """Make it refuse what is added; returns what makes it well again."""
    if kind == "full":
        spool._max_bytes, before = 1, spool._max_bytes
        return lambda: setattr(spool, "_max_bytes", before)
    directory, away = spool._directory, spool._directory.with_name("away")
    spool.close()
    directory.rename(away)
    return lambda: (away.rename(directory), None)[1]


@pytest.mark.parametrize("kind", ["full", "disk"])
async def test_a_problem_that_is_over_is_told_no_more(
    tmp_path: Path, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Though nothing is to be written for hours: health must not tell of what has passed, nor forget what has not."""
    monkeypatch.setattr(spool_tasks, "RETRY_S", 0.02)
    spool, tries = Spool(tmp_path, "gw-1", 1 << 20), list[bool]()
    spool.open()
    test_write = spool.test_write

    def tried() -> None:
        tries.append(False)
        test_write()
        tries[-1] = True

    monkeypatch.setattr(spool, "test_write", tried)
    writer, told = SpoolWriter(spool, thread), list[bool]()
    loop = asyncio.create_task(writer.run())
    try:
        mend = refusing(spool, kind)
        writer.add(pair(1), told.append)
        await eventually(lambda: len(tries) > 2, "it is tried out")
        assert told == [False]
        assert writer.problem is not None
        mend()
        await eventually(lambda: writer.problem is None, "it is over")
    finally:
        await end_all([loop])
        spool.close()
    assert tries == sorted(tries)
    assert not left_of_tries(tmp_path)
