"""The document of a run, for machines.

Its names are those of `vllm bench serve` where it has them. Times end in `_ms` or `_s`; `e2el` is the latency of 200
answers from their scheduled time to the last byte.
"""

import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.bench.measurement.statistics import TierStatistics
from tierlane_tools.bench.plan.objectives import ALL
from tierlane_tools.bench.plan.plan import BenchPlan
from tierlane_tools.bench.report.verdict import error_rate, faults, judgements, warnings
from tierlane_tools.bench.runner import Measurement

QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
GENERATOR = "generator"

Document = dict[str, Any]


def document(plan: BenchPlan, url: str, found: Measurement) -> Document:
    """Everything that was measured."""
    problems = faults(plan, found)
    completed = sum(ok for ok, _ in found.window_completed)
    good = sum(good for _, good in found.window_completed)
    tokens = found.window_tokens or [0] * len(found.measured)
    before, after = found.rss
    return {
        "passed": not problems,
        "faults": problems,
        "warnings": warnings(found),
        "started_at": found.started_at.isoformat(),
        "duration_s": found.window_s,
        **_figures(TierStatistics.merged(ALL, found.measured), completed, good, sum(tokens), found.window_s),
        "error_rate": error_rate(found),
        "crossed": found.crossed,
        "verified": found.verified,
        "repeated_ids": found.repeated_ids,
        "stray_answers": found.strays,
        "answers_without_id": found.without_id,
        "tiers": {
            counters.name: _figures(counters, *completed_and_good, of_tier, found.window_s)
            for counters, completed_and_good, of_tier in zip(
                found.measured, found.window_completed, tokens, strict=True
            )
        },
        "warmup": _counts(TierStatistics.merged(ALL, found.warmup)),
        **_cpu(found),
        "echo": asdict(found.echo) if found.echo else None,
        "rss_mb": {
            role: {"begin": round(before[role] / 1e6, 2), "end": round(after[role] / 1e6, 2)}
            for role in sorted(before.keys() & after.keys())
        },
        "batches": _batches(found),
        "timeline": _timeline(found),
        "lag_ms": _times(found.lag),
        "waited_for_connection": found.waited_for_connection,
        "slo": [
            {"objective": j.objective.text, "bound": j.objective.bound, "actual": j.actual, "met": j.met}
            for j in judgements(plan, found)
        ],
        "audit": {**asdict(found.audit), "ok": found.audit.ok} if found.audit else None,
        "seed": plan.seed,
        "settings": _settings(plan, url, found),
        "versions": _versions(),
    }


def _figures(counters: TierStatistics, completed: int, good: int, tokens: int, window_s: float) -> Document:
    """Counts and latencies of requests that were due in the window; rates of answers that came in it."""
    streams: Document = {}
    if counters.wanted_tokens:
        streams = {
            "total_output_tokens": counters.tokens,
            "wanted_output_tokens": counters.wanted_tokens,
            "output_throughput": tokens / window_s if window_s else 0.0,
            **{f"{name.replace('deviation', 'std')}_ttft_ms": ms for name, ms in _times(counters.first_token).items()},
        }
    return {
        **_counts(counters),
        "request_throughput": completed / window_s if window_s else 0.0,
        "request_goodput": good / window_s if window_s else 0.0,
        **{f"{name.replace('deviation', 'std')}_e2el_ms": value for name, value in _times(counters.latency).items()},
        **streams,
        "error_latency_ms": _times(counters.error_latency),
        "histogram_ms": [[_as_ms(upper), count] for upper, count in counters.latency.steps()],
    }


def _counts(counters: TierStatistics) -> Document:
    return {
        "scheduled": counters.scheduled,
        "sent": counters.sent,
        "answered": counters.answered,
        "completed": counters.ok,
        "good": counters.good,
        "failed": counters.scheduled - counters.ok,
        "unanswered": counters.missing,
        "unanswered_by_cause": {why.value: count for why, count in counters.silent.most_common()},
        "errors": [
            {"status": status, "code": code, "count": count} for (status, code), count in counters.errors.most_common()
        ],
    }


def _times(times: Histogram) -> Document:
    quantiles = {name: _as_ms(times.quantile(share)) for name, share in QUANTILES.items()}
    largest = times.largest if times.count else None
    return {"mean": _as_ms(times.mean), "deviation": _as_ms(times.deviation), **quantiles, "max": _as_ms(largest)}


def _as_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 4)


def _batches(found: Measurement) -> Document | None:
    if found.batches is None:
        return None
    values = asdict(found.batches)
    # Names of a document are texts.
    sizes = {str(size): count for size, count in found.batches.sizes.items()}
    return {**values, "sizes": sizes, "padding_waste": found.padding_waste}


def _timeline(found: Measurement) -> list[Document]:
    names = [counters.name for counters in found.measured]
    return [
        {
            "at_s": step.at_s,
            "length_s": step.length_s,
            "tiers": {
                name: {"completed": tier.completed, "failed": tier.failed, "p99_ms": _as_ms(tier.p99_s)}
                for name, tier in zip(names, step.tiers, strict=True)
            },
        }
        for step in found.timeline
    ]


def _cpu(found: Measurement) -> Document:
    seconds = {role: round(used, 4) for role, used in sorted(found.cpu.by_role.items())}
    servers = _per_thousand(seconds.values(), found) if seconds else None
    over_echo = None
    if servers is not None and found.echo and found.echo.cpu_us:
        over_echo = round(servers * 1000 / found.echo.cpu_us, 3)
    seconds[GENERATOR] = round(found.own_cpu_s, 4)
    return {
        "cpu_seconds": seconds,
        "cpu_seconds_per_1000": {role: _per_thousand([used], found) for role, used in seconds.items()},
        "server_cpu_seconds_per_1000": servers,
        "cpu_over_echo": over_echo,
        "cpu_incomplete": list(found.cpu.incomplete),
        "cpu_answers": found.window_answers,
    }


def _per_thousand(seconds: Iterable[float], found: Measurement) -> float | None:
    return round(sum(seconds) * 1000 / found.window_answers, 6) if found.window_answers else None


def _settings(plan: BenchPlan, url: str, found: Measurement) -> Document:
    mix = dict(zip(plan.mix.tiers, plan.mix.shares, strict=True))
    values = {name: getattr(plan, name) for name in ("rate", "duration", "warmup", "connections", "timeout", "model")}
    return {
        "url": url,
        **values,
        "mode": plan.mode.value,
        "mix": mix,
        "arrivals": plan.arrivals.value,
        "filler_bytes": len(plan.filler.encode()),
        "verify": found.verify,
        "slo": [objective.text for objective in plan.slo],
        "max_error_rate": plan.max_error_rate,
        "trace": {"file": str(plan.trace.path), "api": plan.trace_api.value, **plan.notes} if plan.trace else None,
    }


def _versions() -> dict[str, str]:
    packages: dict[str, str] = {}
    for name in ("tierlane", "uvloop", "msgspec", "psutil"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:  # A checkout that was never installed has no metadata.
            packages[name] = "not installed"
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}
