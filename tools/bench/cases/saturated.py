"""Customers that always have more requests than the GPUs can do: their parts of the GPU time by the audit, and the throughput.

Requests are long, so that the GPUs are the bottleneck, not the processors. For the parts, the first customer has short
requests, the second long ones, and so on; they start two seconds apart, with words in flight in proportion to
their weights.

The throughput of fair order is compared with that of first come, first served, by turns. The product has no switch for the
order and needs none: requests of one customer are served in order of arrival. So the same closed loops, short and long ones
in each customer, run with the keys of ten customers, and then all with the key of one.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cases.customer_load import (
    Load,
    Window,
    answers_in,
    causes,
    failed,
    gpu_ms_by_second,
    latencies_of,
    listed,
    refused,
    run_loads,
    wait_for_audit,
)
from cases.outcome import Check, at_least, at_most, figure, none_of
from cases.stack import Stack, used_us

SHORT, LONG = 80, 800
"""Words of a request."""
SATURATED, WORDS_IN_FLIGHT, APART_S, SETTLE_S = 10, 40_000, 2.0, 4
LEAST_INDEX, MOST_ERROR, LEAST_THROUGHPUT = 0.98, 3.0, 98.0
LEAST_BUSY = 0.95
NAMES = [f"fair-{number}" for number in range(1, SATURATED + 1)]
EQUAL, WEIGHTS = (1.0,) * SATURATED, (1.0, 2.0, 4.0)
SATURABLE = "UPDATE tiers SET shed_depth = NULL, shed_wait_ms = NULL, max_queue_ms = 15000, shadow = {shadow}"
WEIGH = "UPDATE customers SET weight = {weight} WHERE name = 'fair-{number}'"
OF_GATEWAY = """
SELECT coalesce(avg((r.gateway_id LIKE '{gateway}-%')::int), 0) FROM requests AS r JOIN customers AS c ON c.id = r.customer_id
WHERE c.name = 'fair-1' AND r.created_at >= to_timestamp({start})
"""


class Parts(NamedTuple):
    """`index`: Jain's index of GPU time per weight. `error`: the largest relative error of a part."""

    index: float
    error: float


def parts(gpu_ms: Sequence[float], weights: Sequence[float]) -> Parts:
    """Compare the GPU time of customers with their weights."""
    shares = [each / weight for each, weight in zip(gpu_ms, weights, strict=True)]
    fair = sum(gpu_ms) / sum(weights)
    if not fair:
        return Parts(0.0, 1.0)
    index = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
    return Parts(index, max(abs(share / fair - 1) for share in shares))


def weigh(stack: Stack, weights: Sequence[float], *, shadow: bool = False) -> None:
    """Set the weights of the first customers; requests may wait for long from now on, so that customers are saturated.

    `shadow`: the limit of the capacity is not enforced either, so that the order alone decides.
    """
    changes = (WEIGH.format(weight=weight, number=number) for number, weight in enumerate(weights, 1))
    stack.sql(SATURABLE.format(shadow=str(shadow).lower()), *changes)


def loads_of(keys: Sequence[str], weights: Sequence[float], end_s: float, gateway: str = "") -> list[Load]:
    """A load for each weight, until `end_s`. `gateway`: the one that gets all requests of the first customer."""
    loads = []
    for number, (key, weight) in enumerate(zip(keys, weights, strict=False)):
        words = LONG if number % 2 else SHORT
        loops = int(WORDS_IN_FLIGHT * weight / sum(weights) / words)
        loads.append(Load(key, words, loops=loops, begin_s=number * APART_S, end_s=end_s))
    loads[0].gateway = gateway
    return loads


def saturate(
    stack: Stack,
    keys: Sequence[str],
    weights: Sequence[float],
    seconds: int,
    *,
    gateway: str = "",
    shadow: bool = False,
) -> dict[str, Any]:
    """Run one load for each weight; the last `seconds` are judged, after all have started."""
    weigh(stack, weights, shadow=shadow)
    window = Window(round(len(weights) * APART_S) + SETTLE_S, round(len(weights) * APART_S) + SETTLE_S + seconds)
    found = observe(stack, loads_of(keys, weights, window.end, gateway), weights, [window])
    if gateway:
        of_gateway = OF_GATEWAY.format(gateway=gateway, start=found["began"])
        found["of_gateway"] = float(stack.value(of_gateway))
    return {**found, **found["windows"][0]}


def observe(
    stack: Stack,
    loads: Sequence[Load],
    weights: Sequence[float],
    windows: Sequence[Window],
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> dict[str, Any]:
    """Run these loads, and `beside()` at the same time; the parts of the customers in each window, and in each second."""
    began = run_loads(stack, loads, beside)
    wait_for_audit(stack, began, loads)
    seconds = gpu_ms_by_second(stack, began, Window(0, windows[-1].end), NAMES[: len(loads)])
    judged = []
    for window in windows:
        gpu_ms = [sum(of_customer[int(window.start) : int(window.end)]) for of_customer in seconds]
        answers = answers_in(loads, window)
        judged.append(
            {
                **parts(gpu_ms, weights)._asdict(),
                "gpu_ms": [round(each) for each in gpu_ms],
                "busy": _busy(stack, gpu_ms, window),
                "rps": (served := len(latencies_of(answers))) / (window.end - window.start),
                "served": served,
                "refused": refused(answers),
                "failed": failed(answers),
                "causes": causes(answers),
            }
        )
    # As text, since the file of figures has one number a line.
    series = [" ".join(f"{each:.0f}" for each in of_customer) for of_customer in seconds]
    return {"began": began, "gpu_ms_by_second": series, "windows": judged}


def _busy(stack: Stack, gpu_ms: Sequence[float], window: Window) -> float:
    """The part of all GPU time for which customers paid."""
    workers = sum(process.role == "worker" for process in stack.info.processes)
    return sum(gpu_ms) / 1000 / (workers * (window.end - window.start))


def check_equal(title: str, found: Mapping[str, Any]) -> list[Check]:
    """Judge customers of equal weights."""
    return [
        at_least(f"{title}: Jain index of GPU time", found["index"], LEAST_INDEX, "", 4),
        none_of(f"{title}: requests failed", found["failed"]),
        errors(title, found),
    ]


def errors(title: str, found: Mapping[str, Any]) -> Check:
    """All errors by status and code. More than the capacity may be refused."""
    return figure(f"{title}: errors beside {found['served']:,} results", listed(found["causes"]))


def check_weights(title: str, found: Mapping[str, Any]) -> Check:
    """Judge customers of other weights."""
    return at_most(f"{title}: largest error of a part", found["error"] * 100, MOST_ERROR, " %", 2)


def doubts(title: str, found: Mapping[str, Any]) -> list[str]:
    """A note on a load that did not saturate the GPUs: then customers get what they ask for, whatever the order is."""
    if found["busy"] >= LEAST_BUSY:
        return []
    return [f"{title}: the GPUs were only {found['busy']:.0%} busy, so the processors decided, not the order."]


def take_turns(stack: Stack, keys: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure both orders in each round, each of them first in every other round."""
    weigh(stack, EQUAL, shadow=True)
    orders = {"fair": keys[:SATURATED], "arrival": keys[:1] * SATURATED}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in orders}
    for number in range(rounds):
        for name in sorted(orders, reverse=bool(number % 2)):
            turns[name].append(_turn(stack, orders[name], seconds))
    least_busy = min(turn["busy"] for of_order in turns.values() for turn in of_order)
    return {
        "turns": turns,
        "busy": least_busy,
        **{f"{what}_ratio": turns_ratio(turns, what) for what in ("rps", "words", "cpu_us")},
    }


def turns_ratio(turns: Mapping[str, Sequence[Mapping[str, Any]]], what: str) -> float:
    """The median over the rounds of a figure in fair order, relative to order of arrival."""
    return median(fair[what] / other[what] for fair, other in zip(turns["fair"], turns["arrival"], strict=True))


def check_turns(found: Mapping[str, Any]) -> list[Check]:
    """Judge the throughput."""
    title = f"{SATURATED} customers over one customer with the same load"
    every = [turn for turns in found["turns"].values() for turn in turns]
    return [
        at_least(f"{title}: requests/s", found["rps_ratio"] * 100, LEAST_THROUGHPUT, " %", 1),
        at_least(f"{title}: words/s", found["words_ratio"] * 100, LEAST_THROUGHPUT, " %", 1),
        figure(f"{title}: CPU of a request", f"{(found['cpu_us_ratio'] - 1) * 100:+.1f} %"),
        none_of(f"{title}: requests failed", sum(turn["failed"] for turn in every)),
        figure(f"{title}: requests refused", f"{sum(turn['refused'] for turn in every):,}"),
    ]


def _turn(stack: Stack, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    """Each key has half of its words in flight in short requests, and half in long ones."""
    window, of_each = Window(SETTLE_S, SETTLE_S + seconds), WORDS_IN_FLIGHT // len(keys) // 2
    loads = [Load(key, words, loops=of_each // words, end_s=window.end) for key in keys for words in (SHORT, LONG)]
    before = stack.reading()
    began = run_loads(stack, loads)
    after = stack.reading()
    wait_for_audit(stack, began, loads)
    gpu_ms = gpu_ms_by_second(stack, began, window, NAMES)
    served = [len(latencies_of(answers_in([load], window))) for load in loads]
    every = [each for load in loads for each in load.answers]
    return {
        "rps": sum(served) / seconds,
        "words": sum(count * load.words for count, load in zip(served, loads, strict=True)) / seconds,
        "cpu_us": sum(used_us(before, after, len(every)).values()),
        "busy": _busy(stack, [sum(of_customer) for of_customer in gpu_ms], window),
        "refused": refused(every),
        "failed": failed(every),
    }
