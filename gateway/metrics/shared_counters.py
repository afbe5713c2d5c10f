"""The counters of all gateways of a host: each writes its own file, whoever is scraped adds them up. No counter falls.

    <directory>/<gateway>.tally   what a gateway counted, replaced as a whole about once a second
    <directory>/<gateway>.alive   locked by that gateway while it lives
    <directory>/ended.tally       the sum of those that ended, and whose files are in it already
    <directory>/folding           locked by who adds an ended one to that sum

Nobody waits for a lock: who reads notices that something was folded meanwhile, and reads again.
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

TALLY, ALIVE = ".tally", ".alive"
FORM = "1:" + ",".join(map(str, BOUNDS_US))
"""Version and buckets: what was counted in others cannot be added, and Prometheus sees a restart."""

READS = 5


class Tallied(msgspec.Struct, array_like=True, frozen=True):
    """A file: its form, its series, and for the sum of ended ones the names of those in it and how often it was written."""

    form: str
    series: list[tuple[tuple[str, ...], list[int]]]
    folded: tuple[str, ...] = ()
    generation: int = 0


EMPTY = Tallied(FORM, [])
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Tallied).decode


@dataclass(frozen=True, slots=True)
class Sum:
    """Series added up, and of how many living gateways."""

    series: Series
    processes: int


class SharedCounters:
    """One gateway's place in the directory. Every call raises OSError where the directory cannot be used, and blocks."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._alive: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._written = -1

    def write(self, series: Series, number: int) -> None:
        """Replace this gateway's file. A later `number` is newer: of two writers at a time the newer one stands."""
        with self._lock:
            if number <= self._written:
                return
            if self._alive is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._alive = _locked(self._directory / f"{self._name}{ALIVE}")
                if self._alive is None:
                    raise OSError("another gateway has this one's name")
            _replace(self._directory / f"{self._name}{TALLY}", Tallied(FORM, list(series.items())))
            self._written = number

    def sum(self) -> Sum:
        """What all gateways counted, those that ended included."""
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
        """Let go: from now on this gateway counts as ended."""
        with self._lock:
            if self._alive is not None:
                self._alive.close()
                self._alive = None
            self._written = 1 << 62

    @property
    def _ended(self) -> Path:
        return self._directory / f"ended{TALLY}"

    def _files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob(f"*{TALLY}") if path != self._ended)

    def _fold(self) -> None:
        """Add those that ended to their sum; nothing where somebody else is at it."""
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
            still_there = tuple(name for name in ended.folded if (self._directory / f"{name}{TALLY}").exists())
            total = added([ended, _read(path)])
            _replace(
                self._ended,
                Tallied(FORM, list(total.items()), (*still_there, path.stem), ended.generation + 1),
            )
        path.unlink(missing_ok=True)
        path.with_suffix(ALIVE).unlink(missing_ok=True)


def added(files: Iterable[Tallied]) -> Series:
    """The sum, series by series; of one key all are of one length."""
    total: Series = {}
    for file in files:
        for key, numbers in file.series:
            before = total.get(key)
            if before is None:
                total[key] = list(numbers)
            else:
                total[key] = [a + b for a, b in zip(before, numbers, strict=True)]
    return total


def _read(path: Path) -> Tallied:
    """What a file holds; nothing where it is gone or of another form."""
    try:
        read = _decode(path.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError):
        return EMPTY
    return read if read.form == FORM else EMPTY


def _replace(path: Path, content: Tallied) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(_encode(content))
    part.replace(path)


def _locked(path: Path) -> IO[bytes] | None:
    """The file, locked until it is closed; None where somebody else has it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
