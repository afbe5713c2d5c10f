"""The spool's files: whole pairs or nothing, whatever is torn, damaged, full, or killed on the way."""

import base64
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.direct.spool import MAX_LINE_BYTES, Spool, SpoolError, SpoolFull, from_line, to_line
from gateway.inference.recovery import Pair, SpoolEntry
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord

MIB = 1 << 20


def pair(number: int) -> Pair:
    request_id = f"req_{number:032x}"
    return (
        AcceptedRecord(request_id, "customer", "key", "free", "tiny", "gw-1", 5, ""),
        EndedRecord(request_id, "completed", "", 1000 + number, 12.5, 1.0, 2.0, "", 3, "w1", 1, 5, 5, "direct", True),
    )


def opened(directory: Path, owner: str = "gw-1", max_bytes: int = MIB) -> Spool:
    spool = Spool(directory, owner, max_bytes)
    spool.open()
    return spool


def everything(spool: Spool) -> tuple[list[SpoolEntry], list[bytes]]:
    """All that is to be merged: the notes, and the lines that cannot be read."""
    spool.rotate()
    pairs: list[SpoolEntry] = []
    bad: list[bytes] = []
    for path in spool.to_merge():
        part = spool.read(path, 0, 10_000)
        pairs += part.entries
        bad += part.bad
    return pairs, bad


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    """In order, over several groups and files; the size is counted, and falls as files are removed."""
    spool = opened(tmp_path / "spool")
    spool.append([pair(1), pair(2)])
    spool.append([pair(3)])
    spool.rotate()
    spool.append([pair(4)])

    assert everything(spool) == ([pair(n) for n in range(1, 5)], [])
    assert spool.bytes == sum(len(to_line(pair(n))) for n in range(1, 5))
    for path in spool.to_merge():
        spool.remove(path)
    assert (spool.bytes, everything(spool)) == (0, ([], []))
    spool.close()
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_beginning_alone_is_a_line_too(tmp_path: Path) -> None:
    """Before its pair or without one, beside pairs, in the order in which they were written."""
    spool = opened(tmp_path)
    begun = [(pair(n)[0], None) for n in range(3)]
    spool.append([begun[0], begun[1]])
    spool.append([pair(0), begun[2]])

    assert everything(spool) == ([begun[0], begun[1], pair(0), begun[2]], [])
    assert from_line(to_line(begun[0])[:-2] + b"\n") is None
    spool.close()


def test_what_is_reserved_is_for_others(tmp_path: Path) -> None:
    """A group that would leave less does not fit; the same group fits where it may use it up."""
    spool = opened(tmp_path, max_bytes=MAX_LINE_BYTES + len(LINE) * 2)
    spool.append([pair(1)], reserve=len(LINE) + 1)
    assert spool.full
    with pytest.raises(SpoolFull, match="The spool is full"):
        spool.append([pair(2)], reserve=MAX_LINE_BYTES + 1)
    spool.append([pair(2)], reserve=MAX_LINE_BYTES)
    spool.close()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """Directory 0700, file 0600."""
    spool = opened(tmp_path / "spool")
    spool.append([pair(1)])

    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "spool" / "gw-1.log").stat().st_mode & 0o777 == 0o600
    spool.close()


def test_a_large_file_is_read_in_parts(tmp_path: Path) -> None:
    """So many lines at once, each part beginning where the last ended."""
    spool = opened(tmp_path)
    spool.append([pair(n) for n in range(5)])
    spool.rotate()
    (path,) = spool.to_merge()
    offset, sizes = 0, []
    while (part := spool.read(path, offset, 2)).next_offset > offset:
        offset = part.next_offset
        sizes.append(len(part.entries))

    assert sizes == [2, 2, 1]


LINE = to_line(pair(7))


@pytest.mark.parametrize(
    "line",
    [
        LINE[:-1],  # Torn before its newline.
        LINE[: len(LINE) // 2],
        LINE[:-1] + LINE,  # Torn, and written on.
        b"2" + LINE[1:],  # Of another version.
        b"\n",
        b"1 00000000 \n",
        LINE.replace(b" ", b"", 1),
        b"1 %08x abc\n" % zlib.crc32(b"abc"),  # Whole, but no base64.
        b"1 %08x %s\n" % (zlib.crc32(base64.b64encode(b"\x90")), base64.b64encode(b"\x90")),  # No pair.
        b"x" * (MAX_LINE_BYTES * 3) + b"\n",
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    """Its neighbours are read, and it is set aside in a file of its own."""
    spool = opened(tmp_path)
    spool.append([pair(1)])
    with (tmp_path / "gw-1.log").open("ab") as file:
        file.write(line if line.endswith(b"\n") else line + b"\n")
    spool.append([pair(2)])
    pairs, bad = everything(spool)
    (path,) = spool.to_merge()
    spool.set_aside(path, bad)

    assert [each[0].id for each in pairs if each != pair(7)] == [pair(1)[0].id, pair(2)[0].id]
    assert spool.bad_lines == len(bad)
    assert (tmp_path / "gw-1.bad").exists()
    spool.close()


@given(at=st.integers(0, len(LINE) - 1), bit=st.integers(0, 7))
@example(at=len(LINE) - 1, bit=1)
def test_any_flipped_bit_is_noticed(at: int, bit: int) -> None:
    """Wherever it is: the line is never taken for another pair."""
    damaged = bytearray(LINE)
    damaged[at] ^= 1 << bit

    assert from_line(bytes(damaged)) is None


def test_a_torn_tail_is_not_written_on(tmp_path: Path) -> None:
    """The next process of the same name begins a new file, and both are merged."""
    first = opened(tmp_path)
    first.append([pair(1)])
    first.close()
    with (tmp_path / "gw-1.log").open("ab") as file:
        file.write(LINE[:30])
    second = opened(tmp_path)
    second.append([pair(2)])

    assert everything(second) == ([pair(1), pair(2)], [LINE[:30]])
    second.close()


def test_a_full_spool_says_so_and_takes_nothing_more(tmp_path: Path) -> None:
    """Neither part of the group is there; once it is merged there is room again."""
    spool = opened(tmp_path, max_bytes=MAX_LINE_BYTES + len(LINE) * 2)
    spool.append([pair(1)])
    assert not spool.full
    spool.append([pair(2), pair(3)])
    assert spool.full
    with pytest.raises(SpoolError, match="The spool is full"):
        spool.append([pair(n) for n in range(100)])

    assert everything(spool) == ([pair(1), pair(2), pair(3)], [])
    for path in spool.to_merge():
        spool.remove(path)
    assert not spool.full
    spool.append([pair(4)])
    spool.close()


def test_where_the_file_cannot_be_made_the_next_group_tries_again(tmp_path: Path) -> None:
    """A refusing disk is an error in one sentence, and over when it is over."""
    spool = opened(tmp_path)
    blocker = tmp_path / "gw-1.log"
    blocker.mkdir()
    with pytest.raises(SpoolError, match=r"^The spool cannot be written: Is a directory\.$"):
        spool.append([pair(1)])
    moved = next(path for path in tmp_path.iterdir() if path.is_dir())
    moved.rmdir()
    spool.append([pair(2)])

    assert everything(spool) == ([pair(2)], [])
    spool.close()


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    sys.path[:0] = {path!r}
    from gateway.direct.spool import SpoolError
    from unit.test_gateway_spool import everything, opened, pair
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
    spool = opened(Path({directory!r}))
    spool.append([pair(1)])
    try:
        spool.append([pair(2), pair(3), pair(4)])
    except SpoolError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    spool.append([pair(5)])
    pairs, bad = everything(spool)
    print([int(each[0].id[4:], 16) for each in pairs], len(bad), spool.bytes)
"""


def test_a_disk_that_fills_up_in_mid_line_tears_nothing(tmp_path: Path) -> None:
    """The group that did not fit is wholly undone, and what is written after there is room again is whole."""
    script = textwrap.dedent(FULL_DISK).format(path=[p for p in sys.path if p], directory=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    size = len(to_line(pair(1))) + len(to_line(pair(5)))
    assert ran.stdout == f"The spool cannot be written: File too large.\n[1, 5] 0 {size}\n", ran.stderr


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path[:0] = {path!r}
    from unit.test_gateway_spool import opened, pair
    spool = opened(Path({directory!r}), "gw-dead")
    spool.append([pair(1), pair(2)])
    print("written", flush=True)
    time.sleep(60)
"""


def test_the_spool_of_a_killed_gateway_is_anybody_s(tmp_path: Path) -> None:
    """While it lives its lock keeps it; killed, its files can be taken over, and are gone when they are merged."""
    script = textwrap.dedent(KILLED).format(path=[p for p in sys.path if p], directory=str(tmp_path))
    gateway = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    assert gateway.stdout.readline() == "written\n"
    heir = opened(tmp_path, "gw-heir")
    try:
        assert heir.dead_owners() == ["gw-dead"]
        assert heir.take_over("gw-dead") is None
    finally:
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
        gateway.stdout.close()
    taken = heir.take_over("gw-dead")
    assert taken is not None
    lock, paths = taken
    assert [heir.read(path, 0, 10).entries for path in paths] == [[pair(1), pair(2)]]
    assert heir.take_over("gw-dead") is None  # Two heirs do not share it.
    for path in paths:
        heir.remove(path)
    heir.finish("gw-dead", lock)
    heir.close()
    assert list(tmp_path.iterdir()) == []


def test_two_gateways_of_one_name_do_not_share_a_file(tmp_path: Path) -> None:
    """The second is told; once the first has gone it may."""
    first = opened(tmp_path)
    with pytest.raises(SpoolError, match="Another gateway named gw-1"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """One sentence, with the path."""
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"The spool .*/file/spool cannot be used: Not a directory\."):
        opened(tmp_path / "file" / "spool")
