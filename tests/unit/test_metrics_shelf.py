"""The common directory: sums over gateways, those that ended included, never less than before."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.metrics.counters import Series
from gateway.metrics.shared_counters import SharedCounters, Sum

KEY = ("tierlane_requests_total", "free", "/v1/inference", "completed")


def counted(count: int) -> Series:
    return {KEY: [count]}


@pytest.fixture
def shelf_of(tmp_path: Path) -> Iterator[Callable[[str], SharedCounters]]:
    """Makes gateways' places in one directory; all are closed in the end."""
    made: list[SharedCounters] = []

    def make(name: str) -> SharedCounters:
        made.append(SharedCounters(tmp_path, name))
        return made[-1]

    yield make
    for shared_counters in made:
        shared_counters.close()


def total(shared_counters: SharedCounters) -> tuple[int, int]:
    """Requests, and living gateways."""
    seen: Sum = shared_counters.sum()
    return seen.series.get(KEY, [0])[0], seen.processes


def test_every_gateway_tells_the_same_sum(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """Of all files, its own among them."""
    one, two = shelf_of("gw-1"), shelf_of("gw-2")
    one.write(counted(3), 1)
    two.write(counted(4), 1)

    assert total(one) == (7, 2)
    assert total(two) == (7, 2)


def test_what_an_ended_gateway_counted_stays(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """It is folded into one file and its own files go, however often somebody looks; later ones are added."""
    one = shelf_of("gw-1")
    one.write(counted(1), 1)
    for number in range(2, 6):
        other = shelf_of(f"gw-{number}")
        other.write(counted(10), 1)
        other.close()
        assert total(one) == (1 + 10 * (number - 1), 1)
        assert total(one) == (1 + 10 * (number - 1), 1)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ended.tally",
        "folding",
        "gw-1.alive",
        "gw-1.tally",
    ]


def test_a_fold_that_was_cut_off_counts_nothing_twice(
    tmp_path: Path, shelf_of: Callable[[str], SharedCounters]
) -> None:
    """The sum was replaced and the folded file is still there: it is not read again, and goes with the next look."""
    one, two = shelf_of("gw-1"), shelf_of("gw-2")
    one.write(counted(1), 1)
    two.write(counted(10), 1)
    two.close()
    left = (tmp_path / "gw-2.tally").read_bytes()
    assert total(one) == (11, 1)
    (tmp_path / "gw-2.tally").write_bytes(left)

    assert total(one) == (11, 1)
    assert not (tmp_path / "gw-2.tally").exists()


def test_who_folds_disturbs_nobody(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """While somebody else holds the lock nothing is folded, and the ended one's file is still in the sum."""
    one, two, three = (shelf_of(f"gw-{number}") for number in (1, 2, 3))
    for shared_counters in (one, two, three):
        shared_counters.write(counted(5), 1)
    three.close()
    folding = os.open(tmp_path / "folding", os.O_RDWR | os.O_CREAT)
    fcntl.flock(folding, fcntl.LOCK_EX)

    assert total(one)[0] == 15
    assert (tmp_path / "gw-3.tally").exists()
    os.close(folding)
    assert total(two) == (15, 2)


def test_an_older_writing_does_not_undo_a_newer_one(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """Two threads of one gateway may come in any order."""
    shared_counters = shelf_of("gw-1")
    shared_counters.write(counted(9), 2)
    shared_counters.write(counted(8), 1)

    assert total(shared_counters) == (9, 1)


def test_what_cannot_be_read_is_passed_over(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """Half a file, and another version's."""
    shared_counters = shelf_of("gw-1")
    shared_counters.write(counted(2), 1)
    (tmp_path / "half.tally").write_bytes(b"\x92\x01")
    (tmp_path / "future.tally").write_bytes(msgspec.msgpack.encode(["99", [[KEY, [7]]]]))

    assert total(shared_counters) == (2, 1)


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """OSError, for whoever writes."""
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        SharedCounters(tmp_path / "file" / "metrics", "gw-1").write(counted(1), 1)


def test_a_name_that_is_taken_is_refused(tmp_path: Path, shelf_of: Callable[[str], SharedCounters]) -> None:
    """Two gateways of one id would replace each other's file."""
    one = shelf_of("gw-1")
    one.write(counted(1), 1)

    with pytest.raises(OSError, match="name"):
        shelf_of("gw-1").write(counted(1), 1)
