"""A trace as the arrivals of a simulation: the fields of a scenario that it needs, and its requests with their customers.

The length of an answer is the `words` of a request. Without other fields in the scenario, the GPUs are engines with slots, and
requests have the limits of a language model.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from ratelimit.request_limits import LANGUAGE_MODEL
from tierlane.command import OptionReader
from tierlane_tools.bench.plan.mix import Mix, MixError, parse_mix
from tierlane_tools.simulate.command import TOOL
from tierlane_tools.simulate.events import Arrival
from tierlane_tools.simulate.recorded import customer_numbers
from tierlane_tools.simulate.scenario import DEFAULTS, ScenarioError, SimulationScenario, merged
from tierlane_tools.traces.plan import read_trace_options
from tierlane_tools.traces.replay import TraceReplay

SLOTS = 64


def trace_replay(given: Mapping[str, str | None], seed: int) -> TraceReplay | None:
    """The trace of the options; None without one. Raises ScenarioError or TraceError."""
    reader = OptionReader(TOOL, given, ScenarioError)
    options = read_trace_options(reader, _mix(reader), seed)
    return None if options is None else TraceReplay(options)


def _mix(reader: OptionReader) -> Mix:
    try:
        return parse_mix(reader.text("mix"))
    except MixError as error:
        raise reader.fault("mix", f"{error}.") from None


def trace_base(replay: TraceReplay, document: Mapping[str, Any], given: Mapping[str, str | None]) -> dict[str, Any]:
    """The scenario before the document: engines, the limits of a language model, and customers of the tiers without any."""
    classes = document.get("customers")
    classes = classes if isinstance(classes, Mapping) else {}
    known = {each.get("tier") for each in classes.values() if isinstance(each, Mapping)}
    count = OptionReader(TOOL, given, ScenarioError).integer("trace_customers")
    tiers = {
        name: {
            "max_queue_ms": LANGUAGE_MODEL.queue_ms,
            "shed_wait_ms": round(tier["shed_wait_ms"] * LANGUAGE_MODEL.wait_scale) if "shed_wait_ms" in tier else None,
        }
        for name, tier in DEFAULTS["tiers"].items()
    }
    fields = {
        "tiers": tiers,
        "customers": {
            f"{tier} of the trace" if tier in classes else tier: {"tier": tier, "count": count}
            for tier in replay.mix.tiers
            if tier not in known
        },
        "model": {"total_ms": LANGUAGE_MODEL.total_ms},
        "costs": {"slots": SLOTS},
        "duration_s": replay.ends_s,
        "warmup_s": 0.0,
    }
    return merged(DEFAULTS, fields)


def trace_arrivals(replay: TraceReplay, scenario: SimulationScenario) -> list[Arrival]:
    """The requests of the trace with the numbers of the scenario's customers; a customer of the same name is the trace's."""
    numbers = customer_numbers(scenario)
    counts = [(each.tier, each.count) for each in scenario.customers.values()]
    of_tier: dict[str, list[int]] = {}
    for number, tier in enumerate(itertools.chain.from_iterable([tier] * count for tier, count in counts)):
        of_tier.setdefault(tier, []).append(number)
    customers = [of_tier.get(tier, []) for tier in replay.mix.tiers]
    if not all(customers):
        raise ScenarioError(f"--mix: the scenario needs customers of each of its tiers {', '.join(replay.mix.tiers)}.")
    found: list[Arrival] = []
    for request in replay.requests():
        known, choice = numbers.get(request.customer), customers[request.tier]
        number = known[0] if known else choice[int(request.share * len(choice))]
        found.append(Arrival(request.at_s, number, float(request.output_tokens)))
    found.sort()
    return found
