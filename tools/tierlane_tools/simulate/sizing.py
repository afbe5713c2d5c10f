"""Sizing: the fewest GPUs that meet objectives, what one less would cost, and tier settings with which fewer are enough.

Each answer is a simulation of the same requests. More GPUs are taken to be no worse, so the number is found by bisection.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tierlane.output import Column, print_rows
from tierlane_tools.bench.plan.objectives import ALL, SUCCESS, Judgement, Objective
from tierlane_tools.simulate.events import Arrival
from tierlane_tools.simulate.results import ClassFigures, Document
from tierlane_tools.simulate.run import RequestSimulation
from tierlane_tools.simulate.scenario import ScenarioError, SimulationScenario, scenario_from, with_settings

MOST_GPUS = 1024
MORE_SHARES = (0.1, 0.25)
"""Added to the guaranteed share of a tier that misses an objective."""
STEPS = 10
"""Doublings up to MOST_GPUS."""
ALL_SERVED = 0.001
"""Up to this share of refused or failed requests, more GPUs only make the others faster."""
SHED_PARTS = (0.5, 0.2)
"""Of the `shed_wait_ms` of its own and of tiers below."""


class Trial(NamedTuple):
    """One simulation. `setting`: a change of the scenario as of `--set`; `unserved`: the share that was refused or failed."""

    gpus: int
    setting: str
    judgements: tuple[Judgement, ...]
    unserved: Mapping[str, float]

    @property
    def meets(self) -> bool:
        """Whether all objectives are met."""
        return all(each.met for each in self.judgements)


class Sizing(NamedTuple):
    """`least`: the fewest GPUs that meet the objectives, or the most that were tried; `settings`: those for which fewer do."""

    least: Trial
    one_less: Trial | None
    settings: tuple[Trial, ...]


def checked(objectives: Sequence[Objective]) -> Sequence[Objective]:
    """The objectives. Raises ScenarioError for one that is not simulated, or without any."""
    for each in objectives:
        if each.metric != SUCCESS and each.quantile is None:
            raise ScenarioError(
                f"--slo: {each.text!r} is not simulated; use p50, p95, first_token_p95, max or success."
            )
    if not objectives:
        raise ScenarioError("--slo: names no objective.")
    return objectives


class Sizer:
    """Simulates a scenario with other numbers of GPUs and settings. `say` is told of each simulation."""

    def __init__(
        self,
        document: Mapping[str, Any],
        arrivals: Sequence[Arrival],
        objectives: Sequence[Objective],
        say: Callable[[str], None],
    ) -> None:
        self._document = document
        self._arrivals = arrivals
        self._objectives = objectives
        self._say = say
        self._known: dict[tuple[int, str], Trial] = {}

    def size(self) -> Sizing:
        """Find the fewest GPUs, then settings for one less."""
        scenario = scenario_from(self._document)
        most, low = self.trial(scenario.gpus), 0
        while not most.meets:
            fewer = most
            low, most = fewer.gpus, self.trial(min(MOST_GPUS, 2 * fewer.gpus))
            if not most.meets and (most.gpus >= MOST_GPUS or not _helps(fewer, most)):
                return Sizing(most, None, ())
        least = self._fewest(low, most)
        if least.gpus == 1:
            return Sizing(least, None, ())
        one_less = self.trial(least.gpus - 1)
        found = []
        for setting in dict.fromkeys(_settings(scenario, one_less)):
            enough = self.trial(one_less.gpus, setting)
            if enough.meets:
                found.append(self._fewest(0, enough))
        return Sizing(least, one_less, tuple(sorted(found, key=lambda each: each.gpus)))

    def trial(self, gpus: int, setting: str = "") -> Trial:
        """Simulate, once."""
        if (gpus, setting) in self._known:
            return self._known[gpus, setting]
        scenario = scenario_from(with_settings(self._document, [*([setting] if setting else []), f"gpus={gpus}"]))
        figures = RequestSimulation(scenario, self._arrivals).run()
        tiers = {ALL: ClassFigures(ALL, "", 0)}
        for each in figures.classes.values():
            tiers.setdefault(each.tier, ClassFigures(each.tier, "", 0)).add(each)
            tiers[ALL].add(each)
        judgements = tuple(each.judged(_actual(each, tiers.get(each.tier))) for each in self._objectives)
        unserved = {name: 1 - each.completed / each.arrivals if each.arrivals else 0.0 for name, each in tiers.items()}
        found = self._known[gpus, setting] = Trial(gpus, setting, judgements, unserved)
        self._say(f"{_gpus(gpus)}{' with ' + setting if setting else ''}: {'met' if found.meets else 'not met'}")
        return found

    def _fewest(self, low: int, enough: Trial) -> Trial:
        """The fewest GPUs above `low`, which are too few, with the setting of a trial that meets the objectives."""
        while enough.gpus - low > 1:
            middle = self.trial((low + enough.gpus) // 2, enough.setting)
            if middle.meets:
                enough = middle
            else:
                low = middle.gpus
        return enough


def _helps(fewer: Trial, more: Trial) -> bool:
    """Whether more GPUs may still meet what is missed: requests were refused or failed, or STEPS more gains would do."""
    if fewer.unserved[ALL] > ALL_SERVED:
        return True
    for before, after in zip(fewer.judgements, more.judgements, strict=True):
        if not after.met and before.actual is not None and after.actual is not None:
            gain, gap = abs(after.actual - before.actual), abs(after.actual - after.objective.bound)
            if gap > STEPS * gain:
                return False
    return True


def _actual(objective: Objective, figures: ClassFigures | None) -> float | None:
    """What was simulated, in the unit of the objective's bound."""
    if figures is None or not figures.arrivals:
        return None
    if objective.metric == SUCCESS:
        return figures.completed / figures.arrivals
    times = figures.first_token if objective.of_first_token else figures.latency
    quantile = objective.quantile
    ms = times.percentiles((quantile,))[0] if times is not None and quantile is not None else None
    return None if ms is None else ms / 1000


def _settings(scenario: SimulationScenario, missed: Trial) -> Iterator[str]:
    """Changes that may help the tiers that miss an objective: more of their share, less waiting, and that of others.

    If all tiers together complete too few requests, only longer queues may help.
    """
    tiers = scenario.tiers
    spare = 1 - sum(tier.guaranteed_share for tier in tiers.values())
    missing = [each.objective for each in missed.judgements if not each.met]
    if any(each.tier == ALL and each.metric == SUCCESS for each in missing):
        yield from (f"tiers.{name}.max_queue_ms={2 * tier.max_queue_ms}" for name, tier in tiers.items())
        return
    for objective in missing:
        for name in tiers if objective.tier == ALL else (objective.tier,):
            tier = tiers[name]
            for more in MORE_SHARES:
                if more <= spare:
                    yield f"tiers.{name}.guaranteed_share={tier.guaranteed_share + more:.3g}"
            if objective.metric == SUCCESS:
                yield f"tiers.{name}.max_queue_ms={2 * tier.max_queue_ms}"
            elif objective.bound * 1000 < tier.max_queue_ms:
                yield f"tiers.{name}.max_queue_ms={max(1, round(objective.bound * 1000))}"
            for below, other in tiers.items():
                # A tier that sheds earlier itself waits less, and completes less.
                yields = other.priority > tier.priority or (below == name and objective.metric != SUCCESS)
                if yields and other.shed_wait_ms:
                    for part in SHED_PARTS:
                        yield f"tiers.{below}.shed_wait_ms={max(1, round(part * other.shed_wait_ms))}"


def show_sizing(sizing: Sizing) -> None:
    """Print the trials that matter."""
    trials = [sizing.least, *([sizing.one_less] if sizing.one_less else []), *sizing.settings]
    rows = [
        {
            "gpus": each.gpus,
            "setting": each.setting or "-",
            **{judged.objective.text: _cell(judged) for judged in each.judgements},
            "unserved": round(100 * each.unserved[ALL], 2),
            "meets": "yes" if each.meets else "no",
        }
        for each in trials
    ]
    texts = [judged.objective.text for judged in sizing.least.judgements]
    columns = [
        Column("gpus", "GPUS"),
        Column("setting", "SETTING", whole=True),
        *(Column(text, text, whole=True) for text in texts),
        Column("unserved", "REFUSED OR FAILED %"),
        Column("meets", "MET", whole=True),
    ]
    print_rows("table", columns, rows, "simulations")


def sentences(sizing: Sizing) -> list[str]:
    """What the trials say."""
    least, less = sizing.least, sizing.one_less
    if not least.meets:
        return [f"{least.gpus} GPUs do not meet the objectives; they may be out of reach for these requests and tiers."]
    found = [f"{_gpus(least.gpus)} {'meets' if least.gpus == 1 else 'meet'} all objectives."]
    if less is not None:
        missed = [each for each in less.judgements if not each.met]
        found += [
            f"With {less.gpus}, {each.objective.tier} misses {each.objective.text}: {_cell(each)}." for each in missed
        ]
        costs = [
            f"{name} {100 * share:.2f} % instead of {100 * least.unserved[name]:.2f} %"
            for name, share in less.unserved.items()
            if name != ALL
        ]
        found.append(f"With {less.gpus}, are refused or fail: {', '.join(costs)}.")
    found += [f"With --set {each.setting}, {_gpus(each.gpus)} are enough." for each in sizing.settings]
    return found


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _cell(judged: Judgement) -> str:
    if judged.actual is None:
        return "-"
    if judged.objective.metric == SUCCESS:
        return f"{100 * judged.actual:.2f} %"
    return f"{1000 * judged.actual:.1f} ms"


def sizing_document(sizing: Sizing) -> Document:
    """For `--json`."""
    return {
        "least": _trial_document(sizing.least),
        "one_less": _trial_document(sizing.one_less) if sizing.one_less else None,
        "settings": [_trial_document(each) for each in sizing.settings],
    }


def _trial_document(trial: Trial) -> Document:
    return {
        "gpus": trial.gpus,
        "setting": trial.setting or None,
        "met": trial.meets,
        "objectives": [
            {"objective": each.objective.text, "bound": each.objective.bound, "actual": each.actual, "met": each.met}
            for each in trial.judgements
        ],
        "unserved": dict(trial.unserved),
    }
