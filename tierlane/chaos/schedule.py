"""Which fault comes when: a pure function of the seed, so that a breach can be looked for again.

Faults come every 2 to 5 s and may overlap, but never two of one kind on one target, and no other on a role of which one
process is restarted again and again. Kinds are dealt like cards, so
that none is missing for long, and the first deal has one of each family. The first and the last seconds are quiet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tierlane.chaos.faults.catalogue import Kind, Place

QUIET_S = 3.0
GAP_S = (2.0, 5.0)
SHORT_GAP_S = (1.0, 2.5)  # A run of seconds would otherwise see one or two.
SHORT_RUN_S = 30.0
BACK_S = 5.0  # By then a process that was killed is there again, on a machine that has other things to do as well.


@dataclass(frozen=True)
class Planned:
    """One fault to come: `at_s` and `length_s` in seconds, `index` counts from 0 among the targets of `place`."""

    at_s: float
    kind: Kind
    place: Place
    index: int
    length_s: float
    parameters: Mapping[str, float]

    def told(self, target: str) -> str:
        """One line, as it is shown: when, what, on whom, how long."""
        length = f" for {self.length_s:.1f} s" if self.length_s else ""
        drawn = "".join(f", {name} {value:.0f}" for name, value in self.parameters.items())
        return f"{self.at_s:6.1f} s  {self.kind.name} {target}{length}{drawn}"


def schedule(seed: int, duration_s: float, kinds: Sequence[Kind], targets: Mapping[Place, int]) -> list[Planned]:
    """All faults of a run in order of time. `targets`: how many there are of each place; kinds without one are left out.

    The same arguments give the same schedule on every machine.
    """
    possible = [kind for kind in kinds if any(targets.get(place) for place in kind.places)]
    if not possible:
        return []
    random = Random(f"{seed}/faults")
    cards = _dealt(random, possible)
    planned: list[Planned] = []
    for at_s in _times(random, duration_s):
        fault = _planned(random, at_s, next(cards), targets, duration_s - QUIET_S)
        if not any(_clash(fault, other) for other in planned):
            planned.append(fault)
    return planned


def _times(random: Random, duration_s: float) -> Iterator[float]:
    gap = GAP_S if duration_s >= SHORT_RUN_S else SHORT_GAP_S
    at_s = QUIET_S + random.uniform(0.0, gap[0])
    while at_s <= duration_s - QUIET_S:
        yield at_s
        at_s += random.uniform(*gap)


def _dealt(random: Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    """One of each family first, then what is left of the pack, then whole packs for ever."""
    pack = list(kinds)
    random.shuffle(pack)
    first = list({kind.family: kind for kind in pack}.values())
    random.shuffle(first)
    yield from first
    yield from (kind for kind in pack if kind not in first)
    while True:
        random.shuffle(pack)
        yield from pack


def _planned(random: Random, at_s: float, kind: Kind, targets: Mapping[Place, int], end_s: float) -> Planned:
    place = random.choice([place for place in kind.places if targets.get(place)])
    index = random.randrange(targets[place])
    length_s = min(random.uniform(*kind.length_s), max(end_s - at_s, 0.0))
    parameters = {name: random.uniform(*bounds) for name, bounds in sorted(kind.draws.items())}
    return Planned(at_s, kind, place, index, length_s, parameters)


def _clash(one: Planned, other: Planned) -> bool:
    if (one.kind.name, one.place, one.index) == (other.kind.name, other.place, other.index):
        return one.at_s <= _end(other) and other.at_s <= _end(one)
    # While one of a role is restarted again and again, the others are what the promise rests on.
    in_a_row = bool(one.kind.repeats or other.kind.repeats)
    return one.place is other.place and in_a_row and one.at_s <= _back(other) and other.at_s <= _back(one)


def _end(fault: Planned) -> float:
    return fault.at_s + fault.length_s


def _back(fault: Planned) -> float:
    return _end(fault) + BACK_S
