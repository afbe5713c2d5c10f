"""One measurement, the same for every system: checked, idle with one caller, warmed, loaded, checked again."""
# ruff: noqa: INP001 - a folder of scripts, not a package

from typing import NamedTuple

import descendants
import machine
import wrk
from answers import check


class Plan(NamedTuple):
    """Seconds of each part, and connections of the load."""

    connections: int
    seconds: int
    idle_s: int
    warm_s: int


class Measured(NamedTuple):
    """What came out; `idle` is one connection alone, `answered_in_all` counts all three loads;

    `others_cores` is what the machine did besides.
    """

    load: wrk.Figures
    idle: wrk.Figures
    cpu_us: float
    memory: descendants.Usage
    answered_in_all: int
    others_cores: float


def measure(target: wrk.Target, plan: Plan) -> Measured:
    """Raises JobError and WrkError."""
    check(target)
    idle = wrk.load(target, 1, plan.idle_s)
    warm = wrk.load(target, plan.connections, plan.warm_s)
    before, before_s = machine.read(), descendants.cpu_seconds()
    load = wrk.load(target, plan.connections, plan.seconds)
    cpu_s, after = descendants.cpu_seconds() - before_s, machine.read()
    memory = descendants.usage()
    check(target)
    answered = idle.answered + warm.answered + load.answered
    others = machine.others_cores(before, after, cpu_s)
    return Measured(load, idle, cpu_s / load.answered * 1e6, memory, answered, others)
