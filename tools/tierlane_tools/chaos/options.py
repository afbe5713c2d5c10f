"""The options of `tierlane chaos`, declared and checked."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tierlane.command import OptionReader, Tool
from tierlane.settings.declaration import Option
from tierlane_tools.chaos.faults.catalogue import BY_NAME, KINDS
from tierlane_tools.chaos.faults.fault_kind import FaultKind

MAX_SEED = 2**63
MAX_SECONDS = 86_400
MIN_SECONDS = 8  # Shorter runs have no time between the first and last seconds, which are without faults.
MAX_RATE = 10_000
MAX_PROCESSES = 16  # Of one role.
LEAST_PRIMARIES = 3

OPTIONS: dict[str, Option] = {
    "seed": Option(
        "",
        "Seed of load and faults; the same seed gives the same schedule. Unset: random, and printed.",
        "N",
        0,
        MAX_SEED,
    ),
    "seeds": Option(
        "",
        "Several seeds, such as 1-20 or 3,7-9: one run after the other, a row for each, the whole table only for runs "
        "with violations. Unset: one run.",
        "SEEDS",
    ),
    "duration": Option(
        "60",
        "Seconds of load; the first and last 3 s are without faults.",
        "SECONDS",
        MIN_SECONDS,
        MAX_SECONDS,
    ),
    "rate": Option(
        "300",
        "Requests per second over all tiers (open loop).",
        "RATE",
        1,
        MAX_RATE,
    ),
    "gateways": Option("3", "Number of gateways, each on its own port.", "N", 1, MAX_PROCESSES),
    "workers": Option(
        "4",
        "Number of workers; the model reverses its inputs in 50 ms a batch, one in 8 in 300 ms.",
        "N",
        1,
        MAX_PROCESSES,
    ),
    "schedulers": Option("2", "Number of schedulers; 0: gateways do their work.", "N", 0, MAX_PROCESSES),
    "cells": Option(
        "1", "Number of cells, each with a Redis of its own, or a slot of the cluster.", "N", 1, MAX_PROCESSES
    ),
    "cluster": Option(
        "0", "Primaries of a Redis cluster, at least 3, each with a replica; 0: one server.", "N", 0, MAX_PROCESSES
    ),
    "faults": Option("all", "Names of faults, separated by commas; `list` shows them.", "NAMES"),
    "tls": Option("seed", "TLS of the roles to Redis: on, off, or seed (one seed in four).", "WHEN"),
    "engine": Option(
        "",
        "Program of an OpenAI-compatible engine with `POST /control`, such as tools/bench/engine of a checkout: it is the "
        "backend of all workers, and has faults of its own. The load is of chats and texts, streamed or not, without "
        "batches; a rate of 40 suits two CPUs. Unset: the model of `--workers`.",
        "PROGRAM",
    ),
    "against": Option(
        "",
        "Stack file of an external stack with the backend simulated: only faults that need no proxy. "
        "Unset: a new stack.",
        "FILE",
    ),
    "json": Option("", "Write results, schedule and events to this file.", "FILE"),
    "keep": Option("", "Keep logs, history and evidence in this new directory. Unset: they are removed.", "DIR"),
    "quiet": Option("off", "Show only the table of invariants.", switch=True),
}
TOOL = Tool("chaos", OPTIONS)

ALL = "all"
MAX_SEEDS = 1000
_SEEDS = re.compile(r"(?P<first>[0-9]{1,19})(-(?P<last>[0-9]{1,19}))?")
ON, OFF, BY_SEED = "on", "off", "seed"
TLS_ONE_IN = 4
SHAPE = ("gateways", "workers", "schedulers", "cells", "cluster")  # In the order of the fields of StackShape.


class ChaosUsageError(Exception):
    """An option is wrong; the message names it."""


@dataclass(frozen=True)
class StackShape:
    """The number of processes of each role."""

    gateways: int
    workers: int
    schedulers: int
    cells: int = 1
    cluster: int = 0  # Primaries of a cluster; 0: no cluster.

    def __str__(self) -> str:
        """The text in the report."""
        cells = f", {self.cells} cells" if self.cells > 1 else ""
        cluster = f", a cluster of {self.cluster} primaries" if self.cluster else ""
        return f"{self.gateways} gateways, {self.workers} workers, {self.schedulers} schedulers{cells}{cluster}"


@dataclass(frozen=True)
class Options:
    """The checked options. `against` None: a new stack."""

    seed: int
    duration: float
    rate: float
    shape: StackShape
    kinds: tuple[FaultKind, ...]
    against: Path | None
    json: Path | None
    keep: Path | None
    quiet: bool
    seeds: tuple[int, ...] = ()  # Of a series; empty for a single run.
    tls: str = BY_SEED
    engine: Path | None = None

    @property
    def tls_to_redis(self) -> bool:
        """Whether the roles of this run use TLS to Redis."""
        if self.tls == BY_SEED:
            return (
                self.against is None
                and not self.shape.cluster
                and Random(f"{self.seed}/tls").randrange(TLS_ONE_IN) == 0
            )
        return self.tls == ON

    @property
    def stack(self) -> str:
        """The stack in the report."""
        engine = ", an engine" if self.engine else ""
        return f"{self.shape}{engine}{', TLS to Redis' if self.tls_to_redis else ''}"


def read_options(given: Mapping[str, str | None], *, quiet: bool = False) -> Options:
    """Check all options; None means the default. Raises ChaosUsageError."""
    reader = _ChaosOptionReader(TOOL, given, ChaosUsageError)
    against = reader.path("against")
    cluster = reader.primaries("cluster", outside=against is not None)
    engine = reader.path("engine")
    if engine and (against or not engine.exists()):
        raise reader.fault("engine", "cannot be used with --against." if against else f"there is no {engine}.")
    seeds = reader.seeds("seeds")
    if seeds and reader.text("seed"):
        raise reader.fault("seeds", f"cannot be given together with {TOOL.both_names('seed')}.")
    return Options(
        seed=reader.integer("seed") if reader.text("seed") else secrets.randbits(32),
        duration=reader.number("duration"),
        rate=reader.number("rate"),
        shape=StackShape(*(reader.integer(part) for part in SHAPE)),
        kinds=reader.kinds("faults", outside=against is not None, clustered=cluster > 0),
        against=against,
        json=reader.path("json"),
        keep=reader.path("keep"),
        quiet=quiet,
        seeds=seeds,
        engine=engine,
        tls=reader.tls("tls", never="--against" if against else "--cluster" if cluster else ""),
    )


def seed_range(text: str) -> tuple[int, ...]:
    """The seeds of a text such as "1-20" or "3,7-9", each once, in order. Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        match = _SEEDS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a seed nor a range such as 1-20")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last <= MAX_SEED:
            raise ValueError(f"{part.strip()!r} has no seeds from 0 to {MAX_SEED} in rising order")
        if len(found) + last - first >= MAX_SEEDS:
            raise ValueError(f"at most {MAX_SEEDS} seeds can be run in one series")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


class _ChaosOptionReader(OptionReader):
    def seeds(self, option: str) -> tuple[int, ...]:
        text = self.text(option)
        try:
            return seed_range(text) if text else ()
        except ValueError as error:
            raise self.fault(option, f"{error}.") from None

    def tls(self, option: str, *, never: str) -> str:
        """`never`: the option that excludes TLS, or ""."""
        text = self.text(option)
        if text not in (ON, OFF, BY_SEED):
            raise self.fault(option, f"must be {ON}, {OFF} or {BY_SEED}, got {text!r}.")
        if never and text == ON:
            raise self.fault(option, f"cannot be used with {never}.")
        return text

    def primaries(self, option: str, *, outside: bool) -> int:
        count = self.integer(option)
        if 0 < count < LEAST_PRIMARIES:
            raise self.fault(
                option, f"must be 0, or at least {LEAST_PRIMARIES}: fewer primaries cannot elect a new one."
            )
        if count and outside:
            raise self.fault(option, "cannot be used with --against.")
        return count

    def kinds(self, option: str, *, outside: bool, clustered: bool) -> tuple[FaultKind, ...]:
        text = self.text(option)
        if text == ALL:
            return tuple(
                kind for kind in KINDS if (kind.outside or not outside) and kind.is_possible(clustered=clustered)
            )
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in BY_NAME:
                raise self.fault(option, f"there is no fault {name!r}; `--faults list` shows all.")
            if outside and not BY_NAME[name].outside:
                raise self.fault(option, f"{name} cannot be used with --against.")
            if not BY_NAME[name].is_possible(clustered=clustered):
                raise self.fault(option, f"{name} cannot be used {'with' if clustered else 'without'} --cluster.")
        return tuple(BY_NAME[name] for name in dict.fromkeys(names))
