"""`tierlane check model`: load, examine, time, suggest, and on request write the suggestion into the model's row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from gpu_pool.endpoint.access import Access, secrets_of
from gpu_pool.model_launch import ModelLaunch
from ledger.admin.changes import alter, changing, find
from ledger.schema.catalog import models
from scheduler.payload import Task
from tierlane.admin.options import Call
from tierlane.admin.runner import APPLICATION, Done, actor_of, conducted, lines_of
from tierlane.check.contract import TEXTS, examine
from tierlane.check.finding import Finding
from tierlane.check.model_report import Report, document, summary
from tierlane.check.model_report import lines_of as finding_lines
from tierlane.check.probe import Asked, Probe
from tierlane.check.suggestion import Suggestion, suggest
from tierlane.check.timing import measure
from tierlane.connect import UsageError, database
from tierlane.output import print_json
from tierlane.torch_threads import default_torch_threads

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

LOAD_TIMEOUT_S = 120.0
LARGEST = 4096  # As the table's CHECK says.
TASKS = {"complete": Task.COMPLETE, "embed": Task.EMBED}


@dataclass(frozen=True, slots=True)
class Wishes:
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


def check_model(settings: "Settings", wishes: Wishes, output: str, actor: str | None) -> int:
    """Run it to its exit code: 0 where nothing is wrong. Raises UsageError and VerbError, which are one sentence."""
    call = Call(settings, output, actor=actor)
    actor_of(call)  # A bad one is told before minutes of measuring.

    async def work(call: Call) -> int:
        if output == "table":
            typer.echo(f"model {wishes.spec}")
        report = await _report(call.settings, wishes, _shown if output == "table" else _kept)
        await _tell(call, wishes, report)
        return 0 if report.ok else 1

    return conducted(work, call)


def _shown(finding: Finding) -> None:
    typer.echo("\n".join(finding_lines(finding)))


def _kept(finding: Finding) -> None:
    """Programs get the whole at the end."""


async def _report(settings: "Settings", wishes: Wishes, tell: Callable[[Finding], None]) -> Report:
    secrets = secrets_of(wishes.spec, Access(**settings.endpoint_values))
    threads = settings.torch_threads or default_torch_threads(wishes.spec)
    launch = ModelLaunch(wishes.spec, settings.device, threads, settings.dtype, secrets)
    parameters: dict[str, object] = {"temperature": 0, "max_tokens": wishes.max_tokens}
    asked = Asked(parameters if wishes.task == "complete" else {}, TASKS[wishes.task], float(settings.gpu_timeout_ms))
    probe = Probe(launch, asked, LOAD_TIMEOUT_S)
    try:
        findings = []
        async for finding in examine(probe, wishes.poison):
            findings.append(finding)
            tell(finding)
        if not any(finding.name == "length" for finding in findings):  # It does not load, or answers nothing.
            return Report(wishes.spec, probe.version, findings, [], None)
        timing = await measure(probe, wishes.sizes, TEXTS if wishes.text is None else [wishes.text])
        tell(timing.finding)
    finally:
        await probe.close()
    return Report(wishes.spec, probe.version, [*findings, timing.finding], timing.timed, suggest(timing.timed))


async def _tell(call: Call, wishes: Wishes, report: Report) -> None:
    written = wishes.write if wishes.write is not None and report.ok and report.suggestion is not None else None
    if call.output == "table":
        typer.echo("\n".join(summary(report)))
    done = await _write(call, written, report.suggestion) if written and report.suggestion else None
    if call.output == "json":
        print_json(document(report, written))
    elif done is not None:
        typer.echo("\n".join(["", *lines_of(done, dry_run=False)]))
    elif wishes.write is not None:
        typer.echo(f"\nNothing was written to model {wishes.write}: first make good what is wrong.")


async def _write(call: Call, name: str, suggestion: Suggestion) -> Done:
    """Set the row as `tierlane model set` would."""
    values = {column: getattr(suggestion, column) for column in ("max_batch_size", "max_wait_ms", "rps_per_gpu")}
    async with database(call.settings, APPLICATION) as connection, changing(connection, actor_of(call), dry_run=False):
        return Done([await alter(connection, models, await find(connection, models, name), values)])
