"""The spool: audit records on disk, whole or not at all, and their way into it and from it to Redis."""

import asyncio
import base64
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventually import eventually
from gateway.direct import spool_merge, spool_writer
from gateway.direct.spool import MAX_LINE_BYTES, Spool, SpoolError, SpoolFull, from_line, to_line
from gateway.direct.spool_merge import CALL_SIZE, SpoolMerge
from gateway.direct.spool_writer import PAIR_BYTES, SpoolWriter
from gateway.inference.audit_pairs import Pair, SpoolEntry
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.tasks import end_all


def pair(number: int) -> Pair:
    request_id = f"req_{number:032x}"
    return (
        AcceptedRecord(request_id, "customer", "key", "free", "tiny", "gw-1", 5, ""),
        EndedRecord(request_id, "completed", "", 1000 + number, 12.5, 1.0, 2.0, "", 3, "w1", 1, 5, 5, "direct", True),
    )


def accepted(number: int) -> SpoolEntry:
    return pair(number)[0], None


LINE = to_line(pair(7))


def opened(directory: Path, owner: str = "gw-1", max_bytes: int = 1 << 20) -> Spool:
    spool = Spool(directory, owner, max_bytes)
    spool.open()
    return spool


def content(spool: Spool) -> tuple[list[SpoolEntry], list[bytes]]:
    """All that is to be merged: the entries, and the lines that cannot be read."""
    spool.rotate()
    entries: list[SpoolEntry] = []
    bad: list[bytes] = []
    for path in spool.to_merge():
        part = spool.read(path, 0, 10_000)
        entries += part.entries
        bad += part.bad
    return entries, bad


def remove_all(spool: Spool) -> None:
    for path in spool.to_merge():
        spool.remove(path)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = opened(tmp_path / "spool")
    yield made
    made.close()


def test_entries_are_read_in_the_order_of_writing(spool: Spool) -> None:
    """Pairs and single acceptances, over several files, which only their owner may read. The size is counted."""
    entries: list[SpoolEntry] = [pair(1), accepted(5), pair(2), pair(5), accepted(6)]
    spool.append(entries[:2])
    spool.rotate()
    spool.append(entries[2:])
    directory = spool._directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.glob("*.log*")} == {0o600}

    assert content(spool) == (entries, [])
    assert spool.bytes == sum(len(to_line(each)) for each in entries)
    remove_all(spool)
    assert (spool.bytes, content(spool)) == (0, ([], []))
    spool.close()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        LINE[:-1],  # Torn before its newline.
        LINE[:-1] + LINE,  # Torn, and continued.
        b"2" + LINE[1:],  # Of another version.
        b"1 00000000 \n",
        b"1 %08x abc\n" % zlib.crc32(b"abc"),  # Valid checksum, invalid base64.
        b"1 %08x %s\n" % (zlib.crc32(base64.b64encode(b"\x90")), base64.b64encode(b"\x90")),  # Not a pair.
        b"x" * (MAX_LINE_BYTES * 3) + b"\n",
    ],
)
def test_a_damaged_line_does_not_affect_others(tmp_path: Path, line: bytes) -> None:
    """The lines before and after it are read, and it is moved to a file of its own."""
    spool = opened(tmp_path)
    spool.append([pair(1)])
    with (tmp_path / "gw-1.log").open("ab") as file:
        file.write(line if line.endswith(b"\n") else line + b"\n")
    spool.append([pair(2)])
    entries, bad = content(spool)
    (path,) = spool.to_merge()
    spool.set_aside(path, bad)

    assert [each[0].id for each in entries if each != pair(7)] == [pair(1)[0].id, pair(2)[0].id]
    assert spool.bad_lines == len(bad)
    assert (tmp_path / "gw-1.bad").exists()
    spool.close()


@given(at=st.integers(0, len(LINE) - 1), bit=st.integers(0, 7))
@example(at=len(LINE) - 1, bit=1)
def test_any_flipped_bit_is_detected(at: int, bit: int) -> None:
    """A damaged line is never read as another entry."""
    damaged = bytearray(LINE)
    damaged[at] ^= 1 << bit

    assert from_line(bytes(damaged)) is None


def test_a_torn_tail_is_not_continued(tmp_path: Path) -> None:
    """The next process of the same name starts a new file, and both are merged."""
    first = opened(tmp_path)
    first.append([pair(1)])
    first.close()
    with (tmp_path / "gw-1.log").open("ab") as file:
        file.write(LINE[:30])
    second = opened(tmp_path)
    second.append([pair(2)])

    assert content(second) == ([pair(1), pair(2)], [LINE[:30]])
    second.close()


def test_a_full_spool_rejects_whole_groups(tmp_path: Path) -> None:
    """No part of a rejected group is written; space that is reserved for others counts as used."""
    spool = opened(tmp_path, max_bytes=MAX_LINE_BYTES + len(LINE) * 2)
    spool.append([pair(1)])
    assert not spool.full
    with pytest.raises(SpoolFull):
        spool.append([pair(2)], reserve=MAX_LINE_BYTES + 1)
    spool.append([pair(2)], reserve=MAX_LINE_BYTES)
    assert spool.full
    with pytest.raises(SpoolFull):
        spool.append([pair(number) for number in range(100)])

    assert content(spool) == ([pair(1), pair(2)], [])
    remove_all(spool)
    spool.append([pair(4)])
    assert not spool.full
    spool.close()


PRELUDE = """
import resource, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from gateway.direct.spool import SpoolError
from unit.test_gateway_direct_spool import content, opened, pair
directory = Path({directory!r})
"""
FULL_DISK = """
resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
spool = opened(directory)
spool.append([pair(1)])
try:
    spool.append([pair(2), pair(3), pair(4)])
except SpoolError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append([pair(5)])
pairs, bad = content(spool)
print([int(each[0].id[4:], 16) for each in pairs], len(bad), spool.bytes)
"""
KILLED = """
spool = opened(directory, "gw-dead")
spool.append([pair(1), pair(2)])
print("written", flush=True)
time.sleep(60)
"""


def script(text: str, directory: Path) -> list[str]:
    prelude = PRELUDE.format(path=[each for each in sys.path if each], directory=str(directory))
    return [sys.executable, "-c", textwrap.dedent(prelude + text)]


def test_a_disk_that_fills_up_within_a_line_leaves_no_torn_line(tmp_path: Path) -> None:
    """The group is undone, and what is written later is whole."""
    done = subprocess.run(script(FULL_DISK, tmp_path), capture_output=True, text=True, check=False, timeout=60)

    size = len(to_line(pair(1))) + len(to_line(pair(5)))
    assert done.stdout == f"The spool cannot be written: File too large.\n[1, 5] 0 {size}\n", done.stderr


def test_the_spool_of_a_killed_gateway_is_taken_over_once(tmp_path: Path) -> None:
    """Its lock protects it while the gateway runs; its files are removed after the merge."""
    gateway = subprocess.Popen(script(KILLED, tmp_path), stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    assert gateway.stdout.readline() == "written\n"
    other = opened(tmp_path, "gw-other")
    try:
        assert other.dead_owners() == ["gw-dead"]
        assert other.take_over("gw-dead") is None
    finally:
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
        gateway.stdout.close()
    taken = other.take_over("gw-dead")
    assert taken is not None
    lock, paths = taken
    assert [other.read(path, 0, 10).entries for path in paths] == [[pair(1), pair(2)]]
    assert other.take_over("gw-dead") is None
    for path in paths:
        other.remove(path)
    other.finish("gw-dead", lock)
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_directory_is_rejected(tmp_path: Path) -> None:
    """Another running gateway has the same name, or the directory cannot be created."""
    first = opened(tmp_path)
    with pytest.raises(SpoolError, match="Another gateway named gw-1"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"/file/spool cannot be used: Not a directory"):
        opened(tmp_path / "file" / "spool")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    made = ThreadPoolExecutor(1)
    yield made
    made.shutdown()


async def test_entries_that_arrive_during_a_write_share_the_next_one(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """Callbacks run after their entry is on the disk."""
    writer, safe = SpoolWriter(spool, thread), list[tuple[int, bool, int]]()
    task = asyncio.create_task(writer.run())
    for number in range(20):
        writer.add(pair(number), lambda ok, number=number: safe.append((number, ok, spool.bytes)))  # type: ignore[misc]
        if number == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert safe == []
    await eventually(lambda: len(safe) == 20, "all callbacks have run")
    await end_all([task])

    assert [(number, ok) for number, ok, _ in safe] == [(number, True) for number in range(20)]
    assert (writer.groups, min(size for _, _, size in safe) > 0) == (2, True)


async def test_a_failing_callback_does_not_affect_others(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """It is logged, and the other callbacks of the group run."""
    writer, results = SpoolWriter(spool, thread), list[bool]()

    def fail(safe: bool) -> None:
        raise RuntimeError

    writer.add(pair(1), fail)
    writer.add(pair(2), results.append)
    await writer.flush()
    assert results == [True]


async def test_accepted_requests_have_space_for_their_outcome(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    """A full spool rejects acceptances and outcomes of requests without one, and takes the outcomes of accepted requests."""
    spool = opened(tmp_path, max_bytes=5 * PAIR_BYTES)
    writer, results = SpoolWriter(spool, thread), list[bool]()
    for number in range(10):
        writer.add(accepted(number), results.append)
        await writer.flush()
    taken = results.count(True)
    assert results == [True] * taken + [False] * (10 - taken)
    assert 0 < taken < 5
    results.clear()
    for entry in (*(pair(number) for number in range(taken)), accepted(20), *(pair(n) for n in range(30, 60))):
        writer.add(entry, results.append)
    await writer.flush()

    assert results == [True] * taken + [False] * 31
    assert (writer.problem or "").startswith("The spool is full")
    assert writer.rejecting
    assert spool.bytes == sum(len(to_line(accepted(n))) + len(to_line(pair(n))) for n in range(taken))
    assert spool.reserved == 0
    spool.close()


async def test_released_space_is_free_again(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """Also if it is released while a group is written."""
    writer, results = SpoolWriter(spool, thread), list[bool]()
    writer.add(accepted(1), results.append)
    await writer.flush()
    assert spool.reserved == PAIR_BYTES
    writer.add(accepted(2), results.append)
    writing = asyncio.create_task(writer.flush())
    await asyncio.sleep(0)
    writer.release(accepted(1)[0].id)
    await writing
    writer.release(accepted(2)[0].id)

    assert (results, spool.reserved) == ([True, True], 0)


class Redis:
    """Adopts entries; unavailable from call number `fails_from` on."""

    def __init__(self) -> None:
        self.adopted: list[list[SpoolEntry]] = []
        self.fails_from: int | None = None

    async def adopt(self, pairs: Sequence[SpoolEntry]) -> int:
        if self.fails_from is not None and len(self.adopted) >= self.fails_from:
            raise RedisUnavailable("away")
        self.adopted.append(list(pairs))
        return 0


class Merge(SpoolMerge):
    """A merge into a fake Redis, which keeps the remembered pairs."""

    def __init__(self, spool: Spool, thread: ThreadPoolExecutor) -> None:
        self.redis, self.available, self.remembered = Redis(), True, list[Pair]()
        super().__init__(
            spool, thread, self.redis, redis_available=lambda: self.available, remember=self.remembered.extend
        )


async def test_an_interrupted_merge_continues(spool: Spool, thread: ThreadPoolExecutor) -> None:
    """In calls of 256; a file is removed after its last entry."""
    merge = Merge(spool, thread)
    pairs = [pair(number) for number in range(CALL_SIZE * 2 + 10)]
    spool.append(pairs)
    merge.redis.fails_from = 1
    with pytest.raises(RedisUnavailable):
        await merge.merge()
    assert (len(spool.to_merge()), len(merge.remembered)) == (1, CALL_SIZE)
    spool.append([pair(9999)])
    merge.redis.fails_from = None
    await merge.merge()

    assert [len(call) for call in merge.redis.adopted] == [CALL_SIZE, CALL_SIZE, 10, 1]
    assert [each for call in merge.redis.adopted for each in call] == [*pairs, pair(9999)] == merge.remembered
    assert (spool.to_merge(), spool.bytes) == ([], 0)


async def test_an_acceptance_is_merged_alone_if_its_outcome_is_missing(
    spool: Spool, thread: ThreadPoolExecutor
) -> None:
    """A running request's pair follows with the next file; an acceptance beside its pair is not sent."""
    merge = Merge(spool, thread)
    spool.append([accepted(1), accepted(2)])
    spool.append([pair(1)])
    await merge.merge()
    spool.append([pair(2)])
    await merge.merge()

    assert merge.redis.adopted == [[accepted(2), pair(1)], [pair(2)]]
    assert (merge.remembered, spool.bytes) == ([pair(1), pair(2)], 0)


async def test_the_merge_waits_for_redis_and_survives_faults(
    spool: Spool, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts by itself when the circuit breaker closes, and a file that cannot be read is tried again."""
    monkeypatch.setattr(spool_merge, "RETRY_S", 0.01)
    merge, read = Merge(spool, thread), spool.read
    merge.available = False
    faults = iter([PermissionError(13, "Permission denied")])

    def failing_read(*args: Any) -> object:
        for fault in faults:
            raise fault
        return read(*args)

    monkeypatch.setattr(spool, "read", failing_read)
    spool.append([pair(1)])
    task = asyncio.create_task(merge.run())
    await asyncio.sleep(0.25)
    assert merge.redis.adopted == []
    merge.available = True
    await eventually(lambda: spool.bytes == 0, "the file is merged")
    await end_all([task])
    assert merge.redis.adopted == [[pair(1)]]


def leftovers(directory: Path) -> list[Path]:
    return list(directory.rglob("*.try"))


def break_spool(spool: Spool, kind: str) -> Callable[[], None]:
    """Make the spool reject entries; returns the repair."""
    if kind == "full":
        spool._max_bytes, before = 1, spool._max_bytes
        return lambda: setattr(spool, "_max_bytes", before)
    directory, away = spool._directory, spool._directory.with_name("away")
    spool.close()
    directory.rename(away)
    return lambda: (away.rename(directory), None)[1]


@pytest.mark.parametrize("kind", ["full", "disk"])
async def test_a_problem_is_cleared_without_new_entries(
    tmp_path: Path, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The writer tests the disk until it is writable, so that health does not report an old problem."""
    monkeypatch.setattr(spool_writer, "RETRY_S", 0.02)
    spool, tests = opened(tmp_path / "spool"), list[bool]()
    test_write = spool.test_write

    def counted_test() -> None:
        tests.append(False)
        test_write()
        tests[-1] = True

    monkeypatch.setattr(spool, "test_write", counted_test)
    writer, results = SpoolWriter(spool, thread), list[bool]()
    loop = asyncio.create_task(writer.run())
    try:
        repair = break_spool(spool, kind)
        writer.add(pair(1), results.append)
        await eventually(lambda: len(tests) > 2, "the disk is tested")
        assert (results, bool(writer.problem), writer.rejected) == ([False], True, 1)
        repair()
        await eventually(lambda: writer.problem is None, "the problem is cleared")
        writer.add(pair(2), results.append)
        await eventually(lambda: len(results) == 2, "the next entry is written")
    finally:
        await end_all([loop])
        spool.close()
    assert (results, tests) == ([False, True], sorted(tests))
    assert not leftovers(tmp_path)
