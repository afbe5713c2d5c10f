"""The schedule of faults: a pure function of the seed.

Faults begin every 2 to 5 s and may overlap, but not two of one kind on one target, and no other fault affects a role
while one of its processes is restarted repeatedly. Kinds are drawn without replacement, so that none is missing for long,
beginning with one of each family. The first and last seconds are without faults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tierlane_tools.chaos.faults.fault_kind import FaultKind, FaultTarget

QUIET_S = 3.0
GAP_S = (2.0, 5.0)
SHORT_GAP_S = (1.0, 2.5)  # A short run would otherwise have one or two faults.
SHORT_RUN_S = 30.0
BACK_S = 5.0  # By then a killed process is restarted, also on a busy machine.


@dataclass(frozen=True)
class Planned:
    """One planned fault: `at_s` and `length_s` in seconds, `index` counts from 0 among the targets of `place`."""

    at_s: float
    kind: FaultKind
    place: FaultTarget
    index: int
    length_s: float
    parameters: Mapping[str, float]

    def text(self, target: str) -> str:
        """One line: time, fault, target, length."""
        length = f" for {self.length_s:.1f} s" if self.length_s else ""
        drawn = "".join(f", {name} {value:.0f}" for name, value in self.parameters.items())
        return f"{self.at_s:6.1f} s  {self.kind.name} {target}{length}{drawn}"


def schedule(
    seed: int, duration_s: float, kinds: Sequence[FaultKind], targets: Mapping[FaultTarget, int]
) -> list[Planned]:
    """All faults of a run in order of time. `targets`: the number of targets of each place; kinds without one are left out.

    The same arguments give the same schedule on every machine.
    """
    possible = [kind for kind in kinds if any(targets.get(place) for place in kind.places)]
    if not possible:
        return []
    random = Random(f"{seed}/faults")
    drawn = _drawn(random, possible)
    planned: list[Planned] = []
    gap = GAP_S if duration_s >= SHORT_RUN_S else SHORT_GAP_S
    at_s = QUIET_S + random.uniform(0.0, gap[0])
    while at_s <= duration_s - QUIET_S:
        kind = next(drawn)
        place = random.choice([place for place in kind.places if targets.get(place)])
        index = random.randrange(targets[place])
        length_s = min(random.uniform(*kind.length_s), max((duration_s - QUIET_S) - at_s, 0.0))
        parameters = {name: random.uniform(*bounds) for name, bounds in sorted(kind.draws.items())}
        fault = Planned(at_s, kind, place, index, length_s, parameters)
        if not any(_clash(fault, other) for other in planned):
            planned.append(fault)
        at_s += random.uniform(*gap)
    return planned


def _drawn(random: Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """One kind of each family, then all others, then all kinds again and again."""
    kinds_left = list(kinds)
    random.shuffle(kinds_left)
    first = list({kind.family: kind for kind in kinds_left}.values())
    random.shuffle(first)
    yield from first
    yield from (kind for kind in kinds_left if kind not in first)
    while True:
        random.shuffle(kinds_left)
        yield from kinds_left


def _clash(one: Planned, other: Planned) -> bool:
    if (one.kind.name, one.place, one.index) == (other.kind.name, other.place, other.index):
        return one.at_s <= _end(other) and other.at_s <= _end(one)
    # While one process of a role is restarted repeatedly, the others must serve.
    repeated = bool(one.kind.repeats or other.kind.repeats)
    return one.place is other.place and repeated and one.at_s <= _back(other) and other.at_s <= _back(one)


def _end(fault: Planned) -> float:
    return fault.at_s + fault.length_s


def _back(fault: Planned) -> float:
    return _end(fault) + BACK_S
