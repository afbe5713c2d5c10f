"""The counters of all gateways of a host. Each gateway writes its own file; a scrape sums all files. No counter decreases.

    <directory>/<gateway>.tally   counters of a gateway, replaced about once a second
    <directory>/<gateway>.alive   locked by that gateway while it is alive
    <directory>/ended.tally       sum of the gateways that ended, and their names
    <directory>/folding           locked by the gateway that adds an ended one to that sum

No gateway waits for a lock: a reader detects that the sum changed while it read, and reads again.
"""

import fcntl
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from gateway.metrics.counters import BOUNDS_US, Series

COUNTERS, ALIVE = ".tally", ".alive"
FORMAT = "1:" + ",".join(map(str, BOUNDS_US))
"""Version and buckets. Counters in another format are ignored, and Prometheus sees a restart."""

READS = 5  # Attempts to read while the sum of ended gateways changes.

_encode = msgspec.msgpack.Encoder().encode


class CountersFile(msgspec.Struct, array_like=True, frozen=True):
    """A file. `folded` and `generation` are of the sum only: the gateways in it, and how often it was written."""

    format: str
    series: list[tuple[tuple[str, ...], list[int]]]
    folded: tuple[str, ...] = ()
    generation: int = 0


EMPTY = CountersFile(FORMAT, [])
_decode = msgspec.msgpack.Decoder(CountersFile).decode


@dataclass(frozen=True, slots=True)
class Sum:
    """The summed series, and the number of live gateways in it."""

    series: Series
    processes: int


class SharedCounters:
    """The files of one gateway. All methods block, and raise OSError if the directory is not usable."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._alive: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._written = -1

    def write(self, series: Series, number: int) -> None:
        """Replace this gateway's file, unless a higher `number` was written before by another thread."""
        with self._lock:
            if number <= self._written:
                return
            if self._alive is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._alive = _locked(self._directory / f"{self._name}{ALIVE}")
                if self._alive is None:
                    raise OSError("another gateway has the same name")
            _replace(self._directory / f"{self._name}{COUNTERS}", CountersFile(FORMAT, list(series.items())))
            self._written = number

    def sum(self) -> Sum:
        """The sum over all gateways, including those that ended."""
        self._fold()
        ended = _read(self._ended)
        for _ in range(READS):
            files = [path for path in self._files() if path.stem not in ended.folded]
            read = [_read(path) for path in files]
            again = _read(self._ended)
            if again.generation == ended.generation:
                break
            ended = again
        return Sum(added([ended, *read]), len(read))

    def close(self) -> None:
        """Mark this gateway as ended."""
        with self._lock:
            if self._alive is not None:
                self._alive.close()
                self._alive = None
            self._written = 1 << 62

    @property
    def _ended(self) -> Path:
        return self._directory / f"ended{COUNTERS}"

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob(f"*{COUNTERS}") if path != self._ended)

    def _fold(self) -> None:
        """Add gateways that ended to the sum, unless another gateway does so now."""
        lock = _locked(self._directory / "folding")
        if lock is None:
            return
        with lock:
            for path in self._files():
                alive = None if path.stem == self._name else _locked(path.with_suffix(ALIVE))
                if alive is not None:
                    with alive:
                        self._fold_one(path)

    def _fold_one(self, path: Path) -> None:
        ended = _read(self._ended)
        if path.stem not in ended.folded:
            still_there = tuple(name for name in ended.folded if (self._directory / f"{name}{COUNTERS}").exists())
            total = added([ended, _read(path)])
            _replace(
                self._ended,
                CountersFile(FORMAT, list(total.items()), (*still_there, path.stem), ended.generation + 1),
            )
        path.unlink(missing_ok=True)
        path.with_suffix(ALIVE).unlink(missing_ok=True)


def added(files: Iterable[CountersFile]) -> Series:
    """The sum of each series."""
    total: Series = {}
    for file in files:
        for key, numbers in file.series:
            before = total.get(key, [0] * len(numbers))
            total[key] = [a + b for a, b in zip(before, numbers, strict=True)]
    return total


def _read(path: Path) -> CountersFile:
    """The content of a file; EMPTY if it is missing, damaged or in another format."""
    try:
        read = _decode(path.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError):
        return EMPTY
    return read if read.format == FORMAT else EMPTY


def _replace(path: Path, content: CountersFile) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(_encode(content))
    part.replace(path)


def _locked(path: Path) -> IO[bytes] | None:
    """The file, locked until it is closed; None if another process has the lock."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
