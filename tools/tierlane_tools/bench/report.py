"""The result of a run: a document for machines, tables for people, and the verdict.

The document's names are those of `vllm bench serve` where it has them. Times end in `_ms` or `_s`; `e2el` is the
latency of 200 answers from their scheduled time to the last byte. Faults fail a run, warnings say which figures to
doubt.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierlane_tools.bench.plan import BenchPlan
from tierlane_tools.bench.runner import Measurement
from tierlane_tools.bench.statistics import ALL, SUCCESS, Histogram, Judgement, TierStatistics, judge
from tierlane_tools.bench.verification import AuditResult

LAG_LIMIT_S = 0.010
BUSY_LIMIT = 0.9


def judgements(plan: BenchPlan, found: Measurement) -> list[Judgement]:
    """Each objective beside what was measured."""
    tallies = {counters.name: counters for counters in found.measured}
    return judge(plan.slo, tallies | {ALL: TierStatistics.merged(ALL, found.measured)})


def faults(plan: BenchPlan, found: Measurement) -> list[str]:
    """Why the run failed; empty when it passed."""
    sentences = [
        *(["The run was interrupted."] if found.interrupted else []),
        *_unanswered(found),
        *_mixed_up(found),
        *(_missed(judgement) for judgement in judgements(plan, found) if not judgement.met),
        *_error_rate(plan, found),
    ]
    return sentences + (audit_faults(found.audit) if found.audit else [])


def warnings(found: Measurement) -> list[str]:
    """What makes figures doubtful without failing the run."""
    sentences = []
    lag_s = found.lag.quantile(0.99) or 0.0
    if lag_s > LAG_LIMIT_S:
        sentences.append(
            f"The generator was up to {lag_s * 1000:.0f} ms late (p99), which latencies include: "
            "this machine is too busy for this rate."
        )
    if found.window_s and found.own_cpu_s / found.window_s > BUSY_LIMIT:
        sentences.append("The generator used a whole core; the servers may be able to do more.")
    if found.cpu.incomplete:
        sentences.append(f"Replaced or gone during the run, so CPU is missing for: {', '.join(found.cpu.incomplete)}.")
    if found.audit and found.audit.unexplained:
        sentences.append(
            f"{found.audit.unexplained} audit rows belong to no answer: requests without one, "
            "or other traffic with these keys."
        )
    return sentences


def audit_faults(audit: AuditResult) -> list[str]:
    """What the audit check found wrong."""
    if audit.error:
        return [audit.error]
    counts = (
        (audit.missing, "accepted requests have no audit row"),
        (audit.duplicated, "requests have more than one audit row"),
        (audit.wrong_status, "audit rows say otherwise than the answer"),
        (audit.refused, "refused requests have an audit row"),
    )
    return [f"{count} {what} (looked for {audit.waited_s:.1f} s)." for count, what in counts if count]


def _unanswered(found: Measurement) -> list[str]:
    total = TierStatistics.merged(ALL, [*found.warmup, *found.measured])
    if not total.missing:
        return []
    kinds = ", ".join(f"{count} {why.value}" for why, count in total.silent.most_common())
    return [f"{total.missing} requests got no answer ({kinds}).", *found.details.values()]


def _mixed_up(found: Measurement) -> list[str]:
    counts = (
        (found.crossed, "answers hold another output than that of their request"),
        (found.repeated_ids, "answers carry a request id that another answer had"),
        (found.strays, "answers came on connections that had asked for nothing"),
    )
    return [f"{count} {what}." for count, what in counts if count]


def _missed(judgement: Judgement) -> str:
    objective, actual = judgement.objective, judgement.actual
    if actual is None:
        measured = "no sample"
    elif objective.metric == SUCCESS:
        measured = f"{actual * 100:.3f}%"
    else:
        measured = f"{actual * 1000:.1f}ms"
    return f"Objective missed: {objective.text}, measured {measured}."


def error_rate(found: Measurement) -> float:
    """The share of measured requests that did not get a 200; 0 when there was none."""
    total = TierStatistics.merged(ALL, found.measured)
    return (total.scheduled - total.ok) / total.scheduled if total.scheduled else 0.0


def _error_rate(plan: BenchPlan, found: Measurement) -> list[str]:
    rate = error_rate(found)
    if plan.max_error_rate is None or rate <= plan.max_error_rate:
        return []
    return [f"{rate * 100:.3f}% of the requests did not get a 200; at most {plan.max_error_rate * 100:g}% may."]


QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
GENERATOR = "generator"

Document = dict[str, Any]


def document(plan: BenchPlan, url: str, found: Measurement) -> Document:
    """Everything that was measured."""
    problems = faults(plan, found)
    return {
        "passed": not problems,
        "faults": problems,
        "warnings": warnings(found),
        "started_at": found.started_at.isoformat(),
        "duration_s": found.window_s,
        **_all_tiers(found),
        "error_rate": error_rate(found),
        "crossed": found.crossed,
        "verified": found.verified,
        "repeated_ids": found.repeated_ids,
        "stray_answers": found.strays,
        "answers_without_id": found.without_id,
        "tiers": _tiers(found),
        "warmup": _counts(TierStatistics.merged(ALL, found.warmup)),
        **_cpu(found),
        "echo": asdict(found.echo) if found.echo else None,
        "rss_mb": _rss(found),
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


def _all_tiers(found: Measurement) -> Document:
    completed = sum(ok for ok, _ in found.window_completed)
    good = sum(good for _, good in found.window_completed)
    return _figures(TierStatistics.merged(ALL, found.measured), completed, good, found.window_s)


def _tiers(found: Measurement) -> Document:
    return {
        counters.name: _figures(counters, completed, good, found.window_s)
        for counters, (completed, good) in zip(found.measured, found.window_completed, strict=True)
    }


def _figures(counters: TierStatistics, completed: int, good: int, window_s: float) -> Document:
    """Counts and latencies of requests that were due in the window; rates of answers that came in it."""
    return {
        **_counts(counters),
        "request_throughput": completed / window_s if window_s else 0.0,
        "request_goodput": good / window_s if window_s else 0.0,
        **_e2el(counters.latency),
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
        "errors": _errors(counters.errors),
    }


def _errors(errors: Counter[tuple[int, str]]) -> list[Document]:
    return [{"status": status, "code": code, "count": count} for (status, code), count in errors.most_common()]


def _e2el(latency: Histogram) -> Document:
    return {f"{name.replace('deviation', 'std')}_e2el_ms": value for name, value in _times(latency).items()}


def _times(times: Histogram) -> Document:
    quantiles = {name: _as_ms(times.quantile(share)) for name, share in QUANTILES.items()}
    largest = times.largest if times.count else None
    return {"mean": _as_ms(times.mean), "deviation": _as_ms(times.deviation), **quantiles, "max": _as_ms(largest)}


def _as_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 4)


def _rss(found: Measurement) -> Document:
    before, after = found.rss
    return {
        role: {"begin": round(before[role] / 1e6, 2), "end": round(after[role] / 1e6, 2)}
        for role in sorted(before.keys() & after.keys())
    }


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
    seconds[GENERATOR] = round(found.own_cpu_s, 4)
    return {
        "cpu_seconds": seconds,
        "cpu_seconds_per_1000": {role: _per_thousand([used], found) for role, used in seconds.items()},
        "server_cpu_seconds_per_1000": servers,
        "cpu_over_echo": _over_echo(servers, found),
        "cpu_incomplete": list(found.cpu.incomplete),
        "cpu_answers": found.window_answers,
    }


def _over_echo(per_thousand: float | None, found: Measurement) -> float | None:
    if per_thousand is None or not found.echo or not found.echo.cpu_us:
        return None
    return round(per_thousand * 1000 / found.echo.cpu_us, 3)


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
    }


def _versions() -> dict[str, str]:
    packages = {name: _version(name) for name in ("tierlane", "uvloop", "msgspec", "psutil")}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}


def _version(package: str) -> str:
    """A checkout that was never installed has no metadata, which must not cost the figures of the run."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


LATENCIES = ("median", "p95", "p99", "p99.9", "max")


def show(console: Console, result: Document) -> None:
    """Print the whole report."""
    console.print(_tier_table(result))
    if errors := _error_rows(result):
        console.print(_table(("tier", "status", "code", "count"), errors))
    console.print(_cpu_table(result))
    if result["rss_mb"]:
        console.print(_memory_table(result))
    for line in _lines(result):
        console.print(line, highlight=False)
    for sentence in result["warnings"]:
        console.print(f"[yellow]note[/] {escape(sentence)}", highlight=False)
    for sentence in result["faults"]:
        console.print(f"[red]fault[/] {escape(sentence)}", highlight=False)
    console.print("[green]passed[/]" if result["passed"] else "[red]failed[/]", highlight=False)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def _tier_table(result: Document) -> Table:
    # Without an objective every 200 is good, and the column would say nothing.
    good = ("good/s",) if result["slo"] else ()
    columns = ("tier", "due", "ok", "failed", "silent", "ok/s", *good, *LATENCIES)
    figures = [*result["tiers"].items(), (ALL, result)]
    return _table(columns, [_tier_row(name, tier, len(good)) for name, tier in figures])


def _tier_row(name: str, figures: Document, good_columns: int) -> list[str]:
    refused = figures["failed"] - figures["unanswered"]
    counts = [figures["scheduled"], figures["completed"], refused, figures["unanswered"]]
    rates = [figures["request_throughput"], figures["request_goodput"]][: 1 + good_columns]
    times = [figures[f"{latency}_e2el_ms"] for latency in LATENCIES]
    return [name, *map(str, counts), *(f"{rate:.1f}" for rate in rates), *map(_ms_text, times)]


def _ms_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def _error_rows(result: Document) -> list[list[str]]:
    rows = []
    for name, tier in result["tiers"].items():
        rows += [[name, str(e["status"]), e["code"] or "-", str(e["count"])] for e in tier["errors"]]
        rows += [[name, "-", why, str(count)] for why, count in tier["unanswered_by_cause"].items()]
    return rows


def _cpu_table(result: Document) -> Table:
    per_thousand = result["cpu_seconds_per_1000"]
    rows = [
        [role, f"{seconds:.2f}", _share(seconds, result["duration_s"]), _microseconds(per_thousand[role])]
        for role, seconds in result["cpu_seconds"].items()
    ]
    rows.append(["all servers", "", "", _microseconds(result["server_cpu_seconds_per_1000"])])
    if echo := result["echo"]:
        rows.append([f"bare echo, {echo['rate']:.0f}/s", "", "", f"{echo['cpu_us']:.1f}"])
    return _table(("CPU", "seconds", "of a core", "us a request"), rows)


def _memory_table(result: Document) -> Table:
    rows = [
        [role, f"{rss['begin']:.0f}", f"{rss['end']:.0f}", f"{(rss['end'] / rss['begin'] - 1) * 100:+.1f}%"]
        for role, rss in result["rss_mb"].items()
        if rss["begin"]
    ]
    return _table(("memory", "MB at first", "at last", "change"), rows)


def _share(seconds: float, window_s: float) -> str:
    return f"{seconds / window_s * 100:.0f}%" if window_s else "-"


def _microseconds(per_thousand: float | None) -> str:
    # Seconds per 1,000 requests times 1,000 are microseconds per request.
    return "-" if per_thousand is None else f"{per_thousand * 1000:.1f}"


def _lines(result: Document) -> list[str]:
    lag = result["lag_ms"]
    closed = result["settings"]["mode"] == "closed"
    since = "sending it" if closed else "the scheduled time"
    scheduled = f"latencies are milliseconds from {since} to the last byte of a 200"
    late = ", ".join(f"{_ms_text(lag[name])} ms ({name})" for name in ("median", "p99", "max"))
    lines = [
        scheduled,
        f"seed {result['seed']}" + ("" if closed else f", generator late by {late}"),
        f"answers: {result['verified']} verified, {result['crossed']} crossed",
    ]
    if result["cpu_over_echo"]:
        lines.append(f"CPU of all servers: {result['cpu_over_echo']:.2f} times the bare echo's")
    if batches := result["batches"]:
        lines.append(
            f"batches: {batches['batches']}, {_number(batches['mean_size'])} members, {_percent(batches['fill'])} full; "
            f"GPUs busy {_percent(batches['gpu_busy'])} of the time, {batches['workers']} of them; "
            f"padding {_percent(batches['padding_waste'])}"
        )
    if audit := result["audit"]:
        lines.append(
            f"audit: {audit['expected']} accepted, {audit['rows']} rows, {audit['missing']} missing, "
            f"{audit['duplicated']} duplicated, completed {audit['completed_answers']} answers and "
            f"{audit['completed_rows']} rows, after {audit['waited_s']:.1f} s"
        )
    return lines + [
        f"objective {escape(slo['objective'])}: {'met' if slo['met'] else 'missed'}" for slo in result["slo"]
    ]
