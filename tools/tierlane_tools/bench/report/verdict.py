"""The verdict on a run: faults fail it, warnings say which figures to doubt."""

from tierlane_tools.bench.measurement.statistics import TierStatistics
from tierlane_tools.bench.plan.objectives import ALL, SUCCESS, Judgement, judge
from tierlane_tools.bench.plan.plan import BenchPlan
from tierlane_tools.bench.runner import Measurement
from tierlane_tools.bench.verification.audit import AuditResult

LAG_LIMIT_S = 0.010
BUSY_LIMIT = 0.9


def judgements(plan: BenchPlan, found: Measurement) -> list[Judgement]:
    """Each objective beside what was measured."""
    tallies = {counters.name: counters for counters in found.measured}
    return judge(plan.slo, tallies | {ALL: TierStatistics.merged(ALL, found.measured)})


def faults(plan: BenchPlan, found: Measurement) -> list[str]:
    """Why the run failed; empty when it passed."""
    sentences = ["The run was interrupted."] if found.interrupted else []
    total = TierStatistics.merged(ALL, [*found.warmup, *found.measured])
    if total.missing:
        kinds = ", ".join(f"{count} {why.value}" for why, count in total.silent.most_common())
        sentences += [f"{total.missing} requests got no answer ({kinds}).", *found.details.values()]
    counts = (
        (found.crossed, "answers hold another output than that of their request"),
        (found.repeated_ids, "answers carry a request id that another answer had"),
        (found.strays, "answers came on connections that had asked for nothing"),
    )
    sentences += [f"{count} {what}." for count, what in counts if count]
    for judgement in judgements(plan, found):
        if judgement.met:
            continue
        if judgement.actual is None:
            measured = "no sample"
        elif judgement.objective.metric == SUCCESS:
            measured = f"{judgement.actual * 100:.3f}%"
        else:
            measured = f"{judgement.actual * 1000:.1f}ms"
        sentences.append(f"Objective missed: {judgement.objective.text}, measured {measured}.")
    rate = error_rate(found)
    if plan.max_error_rate is not None and rate > plan.max_error_rate:
        most = f"at most {plan.max_error_rate * 100:g}% may"
        sentences.append(f"{rate * 100:.3f}% of the requests did not get a 200; {most}.")
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


def error_rate(found: Measurement) -> float:
    """The share of measured requests that did not get a 200; 0 when there was none."""
    total = TierStatistics.merged(ALL, found.measured)
    return (total.scheduled - total.ok) / total.scheduled if total.scheduled else 0.0
