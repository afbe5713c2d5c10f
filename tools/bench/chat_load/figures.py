"""Figures of a run: latencies from the answers, tokens and queue from the engine's own record."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.steps import Sample

from chat_load.connection import Answer
from chat_load.generator import Ran
from chat_load.plan import SHORT_TOKENS

QUEUE_PART = 0.1
"""An engine whose queue is longer than this part of its slots has got more requests than it can start."""


def percentile(values: Iterable[float], percent: float) -> float | None:
    """A percentile; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else None


def answers_ended_in(ran: Ran) -> list[Answer]:
    """The answers that ended in the window, as a closed loop is judged."""
    return [answer for answer in ran.answers if ran.begin_s <= answer.last_s < ran.end_s]


def answers_due_in(ran: Ran) -> list[Answer]:
    """The answers to requests that were due in the window, as an open loop is judged."""
    return [answer for answer in ran.answers if ran.begin_s <= answer.due_s < ran.end_s]


def latencies(answers: Sequence[Answer]) -> dict[str, Any]:
    """Milliseconds of right answers; `first` and `token` are of streams only. Refusals and errors by status and code."""
    right = [answer for answer in answers if answer.ok]
    streams = [answer for answer in right if answer.chat.load.stream]
    found: dict[str, Any] = {"answers": len(right)}
    for name, values in (
        ("", [answer.latency_ms for answer in right]),
        ("short_", [answer.latency_ms for answer in right if answer.chat.tokens <= SHORT_TOKENS]),
        ("first_", [answer.first_ms for answer in streams]),
        ("token_", [answer.token_ms for answer in streams if answer.chat.tokens > 1]),
    ):
        for percent in (50, 99):
            found[f"{name}p{percent}_ms"] = percentile(values, percent)
    found["refused"] = _codes(answer for answer in answers if answer.refused)
    found["errors"] = _codes(answer for answer in answers if not answer.ok and not answer.refused)
    return found


def _codes(answers: Iterable[Answer]) -> dict[str, int]:
    return dict(Counter(f"{answer.status} {answer.code}" for answer in answers))


def engine_figures(samples: Sequence[Sample], begin_s: float, end_s: float, slots: int) -> dict[str, Any]:
    """Of the engine in a window: tokens/s, mean sequences, and its queue. Means and percentiles are over time."""
    spans = _spans(samples, begin_s, end_s)
    total = sum(seconds for seconds, _ in spans) or 1.0
    waits = sorted((sample.waiting, seconds) for seconds, sample in spans)
    return {
        "tokens_per_s": (tokens_at(samples, end_s) - tokens_at(samples, begin_s)) / (end_s - begin_s),
        "running": sum(seconds * sample.running for seconds, sample in spans) / total,
        "waiting_mean": sum(seconds * sample.waiting for seconds, sample in spans) / total,
        "waiting_p99": _weighted(waits, 0.99 * total),
        "waiting_max": waits[-1][0] if waits else 0,
        "queue_s": longest_s(spans, lambda sample: sample.waiting > QUEUE_PART * slots),
    }


def _spans(samples: Sequence[Sample], begin_s: float, end_s: float) -> list[tuple[float, Sample]]:
    """The samples with the seconds for which each holds in the window."""
    found = []
    ends = [*(each.at_s for each in samples[1:]), end_s]
    for sample, later in zip(samples, ends, strict=False):  # An engine without work has no samples.
        seconds = min(later, end_s) - max(sample.at_s, begin_s)
        if seconds > 0:
            found.append((seconds, sample))
    return found


def _weighted(values: Sequence[tuple[int, float]], target_s: float) -> int:
    passed = 0.0
    for value, seconds in values:
        passed += seconds
        if passed >= target_s:
            return value
    return 0


def longest_s(spans: Iterable[tuple[float, Sample]], true: Callable[[Sample], bool]) -> float:
    """The longest time in seconds for which something is true without a break."""
    longest = now = 0.0
    for seconds, sample in spans:
        now = now + seconds if true(sample) else 0.0
        longest = max(longest, now)
    return longest


def tokens_at(samples: Sequence[Sample], at_s: float) -> float:
    """Tokens that were generated before a time; between two steps in proportion."""
    before: Sample | None = None
    for sample in samples:
        if sample.at_s > at_s:
            if before is None:
                return float(sample.generated_tokens)
            part = (at_s - before.at_s) / (sample.at_s - before.at_s)
            return before.generated_tokens + part * (sample.generated_tokens - before.generated_tokens)
        before = sample
    return float(before.generated_tokens) if before else 0.0


def per_second(samples: Sequence[Sample], begin_s: float, end_s: float, slots: int) -> list[Mapping[str, Any]]:
    """The figures of each second of a window."""
    count = int(end_s - begin_s)
    return [engine_figures(samples, begin_s + at, begin_s + at + 1, slots) for at in range(count)]
