"""The report of a run, for people: tables from its document."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierlane_tools.bench.plan.objectives import ALL
from tierlane_tools.bench.report.document import Document

LATENCIES = ("median", "p95", "p99", "p99.9", "max")
FIRST_TOKENS = ("median", "p95", "p99")


def show(console: Console, result: Document) -> None:
    """Print the whole report."""
    console.print(_tier_table(result))
    if result["settings"]["trace"]:
        console.print(_stream_table(result))
    errors = []
    for name, tier in result["tiers"].items():
        errors += [[name, str(e["status"]), e["code"] or "-", str(e["count"])] for e in tier["errors"]]
        errors += [[name, "-", why, str(count)] for why, count in tier["unanswered_by_cause"].items()]
    if errors:
        console.print(_table(("tier", "status", "code", "count"), errors))
    per_thousand, window_s = result["cpu_seconds_per_1000"], result["duration_s"]
    cpu = []
    for role, seconds in result["cpu_seconds"].items():
        share = f"{seconds / window_s * 100:.0f}%" if window_s else "-"
        cpu.append([role, f"{seconds:.2f}", share, _microseconds(per_thousand[role])])
    cpu.append(["all servers", "", "", _microseconds(result["server_cpu_seconds_per_1000"])])
    if echo := result["echo"]:
        cpu.append([f"bare echo, {echo['rate']:.0f}/s", "", "", f"{echo['cpu_us']:.1f}"])
    console.print(_table(("CPU", "seconds", "of a core", "us a request"), cpu))
    if result["rss_mb"]:
        memory = [
            [role, f"{rss['begin']:.0f}", f"{rss['end']:.0f}", f"{(rss['end'] / rss['begin'] - 1) * 100:+.1f}%"]
            for role, rss in result["rss_mb"].items()
            if rss["begin"]
        ]
        console.print(_table(("memory", "MB at first", "at last", "change"), memory))
    for line in _lines(result):
        console.print(line, highlight=False)
    for sentence in result["warnings"]:
        console.print(f"[yellow]note[/] {escape(sentence)}", highlight=False)
    for sentence in result["faults"]:
        console.print(f"[red]fault[/] {escape(sentence)}", highlight=False)
    console.print(f"[green]passed[/]: {_answered(result)}" if result["passed"] else "[red]failed[/]", highlight=False)


def _answered(result: Document) -> str:
    """What it means that a run has passed: errors fail it only with an option."""
    due, failed = result["scheduled"], result["failed"]
    if not failed:
        return f"all {due} requests got a 200"
    return f"all {due} requests were answered, {failed} of them with an error; --max-error-rate fails such a run"


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
    rows = []
    for name, figures in [*result["tiers"].items(), (ALL, result)]:
        refused = figures["failed"] - figures["unanswered"]
        counts = [figures["scheduled"], figures["completed"], refused, figures["unanswered"]]
        rates = [figures["request_throughput"], figures["request_goodput"]][: 1 + len(good)]
        times = [figures[f"{latency}_e2el_ms"] for latency in LATENCIES]
        rows.append([name, *map(str, counts), *(f"{rate:.1f}" for rate in rates), *map(_number, times)])
    return _table(columns, rows)


def _stream_table(result: Document) -> Table:
    """The streams of a trace."""
    rows = []
    for name, figures in [*result["tiers"].items(), (ALL, result)]:
        if "output_throughput" in figures:
            times = [_number(figures[f"{time}_ttft_ms"]) for time in FIRST_TOKENS]
            counts = f"{figures['total_output_tokens']} of {figures['wanted_output_tokens']}"
            rows.append([name, *times, f"{figures['output_throughput']:.1f}", counts])
    return _table(("first token", *FIRST_TOKENS, "tokens/s", "tokens of the trace's"), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def _microseconds(per_thousand: float | None) -> str:
    # Seconds per 1,000 requests times 1,000 are microseconds per request.
    return "-" if per_thousand is None else f"{per_thousand * 1000:.1f}"


def _lines(result: Document) -> list[str]:
    lag = result["lag_ms"]
    closed = result["settings"]["mode"] == "closed"
    since = "sending it" if closed else "the scheduled time"
    scheduled = f"latencies are milliseconds from {since} to the last byte of a 200"
    late = ", ".join(f"{_number(lag[name])} ms ({name})" for name in ("median", "p99", "max"))
    lines = [
        scheduled,
        f"seed {result['seed']}" + ("" if closed else f", generator late by {late}"),
        *(f"{name}: {escape(note)}" for name, note in (result["settings"]["trace"] or {}).items()),
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
