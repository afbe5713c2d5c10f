"""`tierlane check model`: load, examine, time, suggest, and on request write the suggestion into the model's row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer

from gpu_pool.config import Access, secrets_of
from gpu_pool.model_process.launch import ModelLaunch
from ledger.admin.changes import alter, changing, find
from ledger.schema.catalog import models
from ratelimit.request_limits import LANGUAGE_MODEL, SERVERS, limits_of_backend
from scheduler.payload import Task
from tierlane.admin.change_result import ChangeResult, result_lines
from tierlane.admin.options import VerbCall
from tierlane.admin.remote import APPLICATION
from tierlane.admin.runner import actor_of, run_verb
from tierlane.check.batch_times import measure
from tierlane.check.examination import TEXTS, examine
from tierlane.check.judgements import NOT_TESTED, OF_SERVER
from tierlane.check.model_probe import Probe, ProbeRequest
from tierlane.check.model_report import ModelFinding, Report, document, suggest, summary
from tierlane.check.model_report import lines_of as finding_lines
from tierlane.connect import UsageError, database
from tierlane.output import print_json
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_torch_threads

LOAD_TIMEOUT_S = 120.0
LARGEST = 4096  # As the table's CHECK says.
TASKS = {"complete": Task.COMPLETE, "embed": Task.EMBED}
SUGGESTED = ("max_batch_size", "max_wait_ms", "rps_per_gpu")
"""Columns of the model's row that are written."""


@dataclass(frozen=True, slots=True)
class ModelCheckOptions:
    """What is to be checked: the backend, batch sizes, and which inputs; `write` names the row to set, None: none."""

    spec: str
    sizes: Sequence[int]
    max_tokens: int
    task: str
    text: str | None
    poison: str | None
    write: str | None


def sizes_of(text: str) -> list[int]:
    """Batch sizes as they are given: numbers with commas. Raises UsageError."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > LARGEST:
        raise UsageError(f"--batch-sizes: must be numbers from 1 to {LARGEST} with commas, got {text!r}")
    return sizes


def check_model(settings: Settings, options: ModelCheckOptions, output: str, actor: str | None) -> int:
    """Run it to its exit code: 0 where nothing is wrong. Raises UsageError and VerbError, which are one sentence."""
    call = VerbCall(settings, output, actor=actor)
    actor_of(call)  # A bad actor is rejected before minutes of measurements.

    def tell(*lines: str) -> None:
        if output == "table":  # Programs get the whole at the end.
            typer.echo("\n".join(lines))

    async def work(call: VerbCall) -> int:
        tell(f"model {options.spec}")
        report = await _report(call.settings, options, lambda finding: tell(*finding_lines(finding)))
        tell(*summary(report))
        row = options.write if report.ok and report.suggestion is not None else None
        if row is not None:  # As `tierlane model set` would.
            values = {column: getattr(report.suggestion, column) for column in SUGGESTED}
            async with (
                database(call.settings, APPLICATION) as connection,
                changing(connection, actor_of(call), dry_run=False),
            ):
                done = ChangeResult([await alter(connection, models, await find(connection, models, row), values)])
            tell("", *result_lines(done, dry_run=False))
        elif options.write is not None:
            tell(f"\nNothing was written to model {options.write}: first make good what is wrong.")
        if output == "json":
            print_json(document(report, row))
        return 0 if report.ok else 1

    return run_verb(work, call)


async def _report(settings: Settings, options: ModelCheckOptions, tell: Callable[[ModelFinding], None]) -> Report:
    secrets = secrets_of(options.spec, Access(**settings.endpoint_values))
    threads = settings.torch_threads or default_torch_threads(options.spec)
    launch = ModelLaunch(options.spec, settings.device, threads, settings.dtype, secrets, check=True)
    parameters: dict[str, object] = {"temperature": 0, "max_tokens": options.max_tokens}
    request = ProbeRequest(
        parameters if options.task == "complete" else {},
        TASKS[options.task],
        float(settings.gpu_timeout_ms),
        float(settings.request_limits(limits_of_backend(options.spec)).total_ms),
        float(settings.request_limits(LANGUAGE_MODEL).total_ms),
    )
    probe = Probe(launch, request, LOAD_TIMEOUT_S)
    try:
        findings = []
        is_server = options.spec.startswith(SERVERS)
        async for found in examine(probe, options.poison):
            finding = found._replace(advice=OF_SERVER) if found.advice and is_server else found
            findings.append(finding)
            tell(finding)
        if not any(finding.name == "order" and finding.said != NOT_TESTED for finding in findings):
            # It does not load, or has no usable answers.
            return Report(options.spec, probe.version, findings, [], None)
        timing = await measure(probe, options.sizes, TEXTS if options.text is None else [options.text])
        tell(timing.finding)
    finally:
        await probe.close()
    return Report(options.spec, probe.version, [*findings, timing.finding], timing.timed, suggest(timing.timed))
