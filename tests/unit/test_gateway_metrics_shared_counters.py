"""Counters shared by the gateways of a host: the sum includes stopped gateways and never decreases."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.metrics.counters import Series
from gateway.metrics.shared_counters import SharedCounters

KEY = ("tierlane_requests_total", "free", "/v1/inference", "completed")
Open = Callable[..., SharedCounters]


def counted(count: int) -> Series:
    return {KEY: [count]}


@pytest.fixture
def open_counters(tmp_path: Path) -> Iterator[Open]:
    """Opens the counters of a gateway with these first counts; all are closed at the end."""
    opened: list[SharedCounters] = []

    def open_one(number: int, count: int) -> SharedCounters:
        opened.append(SharedCounters(tmp_path, f"gw-{number}"))
        opened[-1].write(counted(count), 1)
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def total(counters: SharedCounters) -> tuple[int, int]:
    """Requests, and running gateways."""
    found = counters.sum()
    return found.series.get(KEY, [0])[0], found.processes


def test_every_gateway_returns_the_same_sum(tmp_path: Path, open_counters: Open) -> None:
    """Files that cannot be read, because they are incomplete or of another version, are ignored."""
    one, two = open_counters(1, 3), open_counters(2, 4)
    (tmp_path / "half.tally").write_bytes(b"\x92\x01")
    (tmp_path / "future.tally").write_bytes(msgspec.msgpack.encode(["99", [[KEY, [7]]]]))

    assert (total(one), total(two)) == ((7, 2), (7, 2))


def test_counts_of_stopped_gateways_are_folded_into_one_file(tmp_path: Path, open_counters: Open) -> None:
    """Once, however often the sum is read."""
    one = open_counters(1, 1)
    for number in range(2, 6):
        open_counters(number, 10).close()
        assert total(one) == total(one) == (1 + 10 * (number - 1), 1)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ended.tally", "folding", "gw-1.alive", "gw-1.tally"]


def test_an_interrupted_fold_counts_nothing_twice(tmp_path: Path, open_counters: Open) -> None:
    """The sum was replaced and the folded file is still there: it is removed with the next read."""
    one = open_counters(1, 1)
    open_counters(2, 10).close()
    left = (tmp_path / "gw-2.tally").read_bytes()
    assert total(one) == (11, 1)
    (tmp_path / "gw-2.tally").write_bytes(left)

    assert total(one) == (11, 1)
    assert not (tmp_path / "gw-2.tally").exists()


def test_the_sum_is_complete_while_another_gateway_folds(tmp_path: Path, open_counters: Open) -> None:
    """A gateway that does not get the lock reads the file of the stopped gateway, and the next one folds it."""
    one, two = open_counters(1, 5), open_counters(2, 5)
    open_counters(3, 5).close()
    folding = os.open(tmp_path / "folding", os.O_RDWR | os.O_CREAT)
    fcntl.flock(folding, fcntl.LOCK_EX)

    assert total(one)[0] == 15
    assert (tmp_path / "gw-3.tally").exists()
    os.close(folding)
    assert total(two) == (15, 2)


def test_an_older_write_does_not_replace_a_newer_one(open_counters: Open) -> None:
    """Two threads of one gateway may write in any order."""
    one = open_counters(1, 1)
    one.write(counted(9), 3)
    one.write(counted(8), 2)

    assert total(one) == (9, 1)


def test_an_unusable_directory_and_a_used_name_are_errors(tmp_path: Path, open_counters: Open) -> None:
    """Two gateways of one name would replace each other's file."""
    open_counters(1, 1)
    with pytest.raises(OSError, match="name"):
        open_counters(1, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SharedCounters(tmp_path / "file" / "metrics", "gw-1").write(counted(1), 1)
