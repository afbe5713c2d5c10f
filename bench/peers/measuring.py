"""One measurement, the same for every system: checked, idle with one caller, warmed, loaded, checked again."""
# ruff: noqa: INP001 - a folder of scripts, not a package

from typing import NamedTuple

import descendants
import machine
import wrk
from answers import check

QUIET_CORES = 0.2
"""Up to here what the machine does besides counts as nothing."""


class Plan(NamedTuple):
    """Seconds of each part, connections of the load, and how often at most it is counted until the machine was quiet."""

    connections: int
    seconds: int
    idle_s: int
    warm_s: int
    attempts: int


class Counted(NamedTuple):
    """One counted load; `others_cores` is what the machine did besides."""

    load: wrk.Figures
    cpu_us: float
    others_cores: float

    @property
    def quiet(self) -> bool:
        """Whether the figures are of this system alone."""
        return self.others_cores <= QUIET_CORES


class Measured(NamedTuple):
    """What came out; `idle` is one connection alone, `answered_in_all` counts every load."""

    counted: Counted
    idle: wrk.Figures
    memory: descendants.Usage
    answered_in_all: int
    attempts: int


def measure(target: wrk.Target, plan: Plan) -> Measured:
    """Of several counted loads the least disturbed is taken, however it turned out. Raises JobError and WrkError."""
    check(target)
    idle = wrk.load(target, 1, plan.idle_s)
    warm = wrk.load(target, plan.connections, plan.warm_s)
    tries = [_count(target, plan)]
    while len(tries) < plan.attempts and not tries[-1].quiet:
        tries.append(_count(target, plan))
    memory = descendants.usage()
    check(target)
    answered = idle.answered + warm.answered + sum(counted.load.answered for counted in tries)
    best = min(tries, key=lambda counted: counted.others_cores)
    return Measured(best, idle, memory, answered, len(tries))


def _count(target: wrk.Target, plan: Plan) -> Counted:
    before, before_s = machine.read(), descendants.cpu_seconds()
    load = wrk.load(target, plan.connections, plan.seconds)
    cpu_s, after = descendants.cpu_seconds() - before_s, machine.read()
    return Counted(load, cpu_s / load.answered * 1e6, machine.others_cores(before, after, cpu_s))
