"""`tierlane check model`: load, examine, time, suggest, and on request write the suggestion into the model's row.

The model runs in a child process as a worker's does, so that what crashes or hangs ends there alone; after a crash the
next question starts another process. The contract's batches are run in order, and pure functions (`judge_*`) turn
answers into findings. Timing runs batches of each size: a first one that does not count, then some until a second is
over.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import typer

from gpu_pool.backends.backend import ItemResult
from gpu_pool.config import Access, secrets_of
from gpu_pool.model_process.handle import ModelHung, ModelLaunch, ModelProcess, run_watched
from gpu_pool.worker.slow_model import TRIAL_CAPS
from ledger.admin.changes import alter, changing, find
from ledger.schema.catalog import models
from ratelimit.request_limits import limits_of_backend
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.payload import Payload, Task, encode_payload
from tierlane.admin.options import VerbCall
from tierlane.admin.runner import APPLICATION, ChangeResult, actor_of, lines_of, run_verb
from tierlane.check.model_report import (
    ModelFinding,
    Report,
    Suggestion,
    Timed,
    document,
    fails,
    holds,
    suggest,
    summary,
    undetermined,
)
from tierlane.check.model_report import lines_of as finding_lines
from tierlane.check.model_times import advice, shortfall
from tierlane.connect import UsageError, database
from tierlane.output import print_json
from tierlane.settings.pools import default_torch_threads

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """How each text is put to the model: parameters and task of the request, and how long a batch may run."""

    parameters: dict[str, object] = field(default_factory=dict)
    task: Task = Task.COMPLETE
    timeout_ms: float = 3000.0
    total_ms: float = 4000.0
    """The deadline of a request, for the finding about the time of a batch."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What came of one batch: its time and results, `fault` where it was taken apart, `lost` where the process was lost.

    `hung`: it was lost because it ran for too long.
    """

    ms: float = 0.0
    results: list[ItemResult] = field(default_factory=list)
    fault: str = ""
    lost: str = ""
    hung: bool = False

    @property
    def outputs(self) -> list[str | None]:
        """Of each item, None where it failed."""
        return [None if result.error_code else result.output for result in self.results]

    @property
    def too_long(self) -> bool:
        """Whether the time limit ended the process or inputs; after a fault it may be the fault that took the time."""
        late = any(result.error_code == ErrorCode.GPU_TIMEOUT for result in self.results)
        return self.hung or (late and not self.fault)

    @property
    def wrong(self) -> str:
        """Why this is not one good answer for each input, in a sentence; "": it is."""
        failed = [result for result in self.results if result.error_code]
        return self.lost or self.fault or (f"{failed[0].error_code}: {failed[0].output}" if failed else "")


class NotLoaded(TierlaneError):
    """The model does not load; the message says why."""


class Probe:
    """Sends batches to one model process. The caller closes it."""

    def __init__(self, launch: ModelLaunch, request: ProbeRequest, load_timeout_s: float) -> None:
        self._launch = launch
        self._request = request
        self._load_timeout_s = load_timeout_s
        self._model: ModelProcess | None = None
        self.version = ""
        self.load_s = 0.0

    async def load(self) -> None:
        """Start the process and wait until it is ready. Raises NotLoaded."""
        started = time.monotonic()
        try:
            self._model = await ModelProcess.spawn(self._launch)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await self._model.ready()
        except TimeoutError:
            await self.close()
            raise NotLoaded(f"The model did not load within {self._load_timeout_s:g} s.") from None
        except (TierlaneError, OSError) as error:
            await self.close()
            raise NotLoaded(str(error)) from error
        self.load_s = time.monotonic() - started

    async def ask(self, texts: Sequence[str], *, caps: float = 1.0) -> ProbeAnswer:
        """One batch of these, for at most so many times the cap; never raises for what the model does."""
        request = self._request
        bodies = [encode_payload(Payload("check", text, request.parameters, request.task)) for text in texts]
        limit = caps * request.timeout_ms
        try:
            done = await run_watched(await self._ready(), bodies, cap_ms=limit, timeout_ms=limit, budget_ms=limit)
        except TierlaneError as error:  # Lost, hung, not loaded, too large to be sent: all of them end this batch.
            await self.close()
            return ProbeAnswer(lost=str(error), hung=isinstance(error, ModelHung))
        return ProbeAnswer(done.gpu_ms, done.results, done.fault)

    async def timing(self) -> ModelFinding:
        """Whether a batch of one text ends within cap and deadline; its time is measured also if it does not."""
        request = self._request
        return judge_time(await self.ask(TEXTS[:1], caps=TRIAL_CAPS), request.timeout_ms, request.total_ms)

    async def close(self) -> None:
        """End the process, if there is one."""
        model, self._model = self._model, None
        if model is not None:
            await model.close()

    async def _ready(self) -> ModelProcess:
        if self._model is None:
            await self.load()
        if self._model is None:
            raise NotLoaded("The model process is gone.")
        return self._model


FEWEST, MOST = 3, 20
ENOUGH_MS = 1000.0
LONGER = "Raise --gpu-timeout-ms, or give the device less to do."
SMALLER = "Leave --batch-sizes and max_batch_size under it, or give the device more memory."


class Timing(NamedTuple):
    """What was measured, and the finding about sizes that were asked for."""

    timed: list[Timed]
    finding: ModelFinding


async def measure(probe: Probe, sizes: Sequence[int], texts: Sequence[str]) -> Timing:
    """The median times of these sizes, smallest first, up to the first that does not run; texts are repeated to fill."""
    timed: list[Timed] = []
    for size in sorted(set(sizes)):
        runs_ms, last = await _runs(probe, [texts[place % len(texts)] for place in range(size)])
        if last.too_long:
            return Timing(timed, _too_long(timed, size, last.wrong))
        if last.wrong:
            return Timing(timed, fails("sizes", f"a batch of {size}: {last.wrong}", SMALLER))
        timed.append(Timed(size, median(runs_ms[1:])))
    return Timing(timed, holds("sizes", f"batches of {timed[0].size} to {timed[-1].size} run"))


async def _runs(probe: Probe, batch: Sequence[str]) -> tuple[list[float], ProbeAnswer]:
    """The times of a batch that is run again and again, up to the first one that goes wrong; and what came last."""
    runs_ms: list[float] = []
    while True:
        answer = await probe.ask(batch)
        runs_ms.append(answer.ms)
        if answer.wrong or _enough(runs_ms):
            return runs_ms, answer


def _enough(runs_ms: Sequence[float]) -> bool:
    return len(runs_ms) > MOST or (len(runs_ms) > FEWEST and sum(runs_ms) >= ENOUGH_MS)


def _too_long(timed: Sequence[Timed], size: int, said: str) -> ModelFinding:
    """No fault of the model, as long as smaller batches end in time."""
    if timed:
        return holds("sizes", f"batches of {size} run for too long, smaller ones do not")
    return fails("sizes", f"a batch of {size}: {said}", LONGER)


BLAMED = frozenset({ErrorCode.POISON_REQUEST, ErrorCode.INVALID_OUTPUT, ErrorCode.GPU_TIMEOUT})
"""Codes that say that the model failed; any other one is an answer of its own, to an input that it does not take."""

RAISED = "The model raised "
"""How a fault begins that is an exception, and not an answer of the wrong form."""

LENGTH = "Return a list with exactly one answer for each input, whatever the inputs are."
KIND = "Return a str for each input; no bytes, no None, no dictionaries, and nothing that UTF-8 cannot carry."
ORDER = "Put the answers back into the order of the inputs, if you sort or group them."
RANDOM = "Fix the seed, or choose greedily at temperature 0. Leave cache_ttl_s at 0 until then."
ALONE = "Raise an exception for a bad input; let nothing of it stay behind that the next batch could see."
SURVIVE = "Catch what it is in the function: as it is, each such request costs a restart and three attempts."
REFUSE = "Handle it, or reject it with a message of your own; now its customer gets 422 poison_request."


def judge_time(alone: ProbeAnswer, timeout_ms: float, total_ms: float) -> ModelFinding:
    """Whether a batch of one ends within the cap of a batch and the deadline of a request."""
    ms = TRIAL_CAPS * timeout_ms if alone.hung else alone.ms
    if alone.lost and not alone.hung:
        return undetermined("time", "a batch of one was lost, so its time is not known")
    if why := shortfall("the model", ms, timeout_ms, total_ms):
        return fails(
            "time", f"{why}{' (stopped)' if alone.too_long else ''}: no request can be served", advice(ms, timeout_ms)
        )
    limits = (
        f"a batch may take {timeout_ms:,.0f} ms (--gpu-timeout-ms), a request {total_ms:,.0f} ms (--total-request-ms)"
    )
    return holds("time", f"a batch of one takes {ms:,.0f} ms; {limits}")


def judge_answered(together: ProbeAnswer) -> ModelFinding:
    """Whether a plain batch was answered at all."""
    if together.too_long:
        return fails("answers", together.wrong, LONGER)
    if together.lost:
        return fails("answers", together.lost, SURVIVE)
    if together.fault.startswith(RAISED):
        return fails("answers", together.fault, "Look for its traceback by calling the model on plain texts.")
    return holds("answers", f"a batch of {len(together.results)} in {together.ms:.1f} ms")


def judge_length(answers: Sequence[ProbeAnswer]) -> ModelFinding:
    """Whether every batch ran as it came, with as many answers as inputs."""
    for answer in answers:
        if answer.lost:
            return fails("length", answer.lost, SURVIVE)
        if answer.fault and not answer.fault.startswith(RAISED):
            return fails("length", answer.fault, LENGTH)
    sizes = ", ".join(str(size) for size in sorted({len(answer.results) for answer in answers}))
    return holds("length", f"one answer for each input, in batches of {sizes}")


def judge_kind(together: ProbeAnswer) -> ModelFinding:
    """Whether every answer is a text."""
    failed = [result for result in together.results if result.error_code]
    if not failed:
        return holds("type", "every answer is a string")
    said = f"{len(failed)} of {len(together.results)} answers failed. {failed[0].error_code}: {failed[0].output}"
    return fails("type", said, KIND)


def judge_order(together: ProbeAnswer, alone: Sequence[ProbeAnswer]) -> ModelFinding:
    """Whether each answer of a batch is that of its input alone; one that is another's says that they are mixed up."""
    expected = [answer.outputs[0] if answer.outputs else None for answer in alone]
    places = [place for place, output in enumerate(together.outputs) if output != expected[place]]
    mixed = [place for place in places if together.outputs[place] in expected and together.outputs[place] is not None]
    if mixed:
        theirs = expected.index(together.outputs[mixed[0]])
        return fails("order", f"input {mixed[0] + 1} got the answer of input {theirs + 1}", ORDER)
    if len(set(expected)) == 1:
        return undetermined("order", "all answers are equal, so their order cannot be seen")
    if places:
        return undetermined("order", f"{len(places)} of {len(expected)} answers differ from those of the inputs alone")
    return holds("order", "each answer is that of its input alone")


def judge_determinism(first: ProbeAnswer, second: ProbeAnswer) -> ModelFinding:
    """Whether equal inputs got equal answers."""
    differ = sum(a != b for a, b in zip(first.outputs, second.outputs, strict=True)) if not second.lost else None
    if differ is None:
        return fails("determinism", second.lost, SURVIVE)
    if differ:
        said = f"{differ} of {len(first.results)} answers differ when the same batch runs again"
        return fails("determinism", said, RANDOM)
    return holds("determinism", "the same batch, run again, has the same answers")


def judge_odd(name: str, answer: ProbeAnswer) -> ModelFinding:
    """Whether an input of an unusual kind is answered, or refused in good form."""
    if answer.lost:
        return fails(name, answer.lost, SURVIVE)
    if answer.too_long:
        return fails(name, answer.wrong, LONGER)
    result = answer.results[0]
    if result.error_code in BLAMED:
        return fails(name, answer.fault or result.output, REFUSE)
    if result.error_code:
        return holds(name, f"refused with {result.error_code}")
    return holds(name, f"answered with {len(result.output):,} characters")


def judge_isolation(place: int, mixed: ProbeAnswer, good: Mapping[int, str | None], *, steady: bool) -> ModelFinding:
    """Whether the bad input at `place` fails alone.

    `good` has the answers that its neighbours get without it; where answers are not `steady`, any answer will do.
    """
    if mixed.lost:
        return fails("isolation", mixed.lost, SURVIVE)
    if not mixed.results[place].error_code:
        return undetermined("isolation", "the model answers the input that --poison names; name one that it raises on")
    spoilt = [n for n in good if mixed.outputs[n] is None]
    changed = [n for n in good if steady and mixed.outputs[n] not in (good[n], None)]
    if spoilt or changed:
        what = "fail with it" if spoilt else "have another answer than without it"
        return fails("isolation", f"{len(spoilt or changed)} of its {len(good)} neighbours {what}", ALONE)
    return holds("isolation", f"a bad input fails alone ({mixed.results[place].error_code})")


def unknown_isolation() -> ModelFinding:
    """Nothing is known that the model raises on."""
    return undetermined("isolation", "no input is known that the model raises on; name one with --poison")


TEXTS = (
    "A river runs",
    "Seven ships set out at dawn, and the oldest of them carried no flag, no cargo and no crew",
    "why?",
    "The price of bread rose again",
    "Count the stones in the wall and say whether there are more than ninety of them",
)
"""Different lengths in no order, so that a model that sorts them and forgets to sort back is seen."""

ODD = {
    "empty": "",
    "unicode": "\u017c\u00f3\u0142\u0107 \u6f22\u5b57 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \U0001f469\u200d\U0001f680 e\u0301 \x00 \u202e \ufeff",
    "long": "All work and no play makes a long text. " * 1000,
}
PLACE = 2  # Of the bad input among good ones.


async def examine(probe: Probe, poison: str | None) -> AsyncIterator[ModelFinding]:
    """All findings as they are made; those that rest on a failed one are left out."""
    try:
        await probe.load()
    except NotLoaded as error:
        yield fails("load", str(error), "See what the model wrote above; a worker would refuse it, too.")
        return
    yield holds("load", f"in {probe.load_s:.1f} s, version {probe.version}")
    together = await probe.ask(TEXTS)
    yield judge_answered(together)
    if together.hung or not together.lost:
        yield await probe.timing()
    if together.lost or together.too_long:
        return
    again = await probe.ask(TEXTS)
    steady = judge_determinism(together, again)
    for finding in (*await _batches(probe, together), steady):
        yield finding
    odd = {}
    for name, text in ODD.items():
        odd[name] = await probe.ask([text])
        yield judge_odd(name, odd[name])
    bad = poison if poison is not None else _raised_on(odd)
    yield await _isolation(probe, together, bad, steady=steady.ok is True)


async def _batches(probe: Probe, together: ProbeAnswer) -> list[ModelFinding]:
    alone = [await probe.ask([text]) for text in TEXTS]
    return [
        judge_length([together, *alone]),
        judge_kind(together),
        judge_order(together, alone),
    ]


def _raised_on(odd: dict[str, ProbeAnswer]) -> str | None:
    """An input that the model was seen to fail on without taking the process along."""
    return next((ODD[name] for name, answer in odd.items() if any(map(_blamed, answer.results))), None)


def _blamed(result: ItemResult) -> bool:
    return result.error_code in BLAMED


async def _isolation(probe: Probe, together: ProbeAnswer, bad: str | None, *, steady: bool) -> ModelFinding:
    if bad is None:
        return unknown_isolation()
    mixed = await probe.ask([*TEXTS[:PLACE], bad, *TEXTS[PLACE:]])
    good = {place + (place >= PLACE): output for place, output in enumerate(together.outputs)}
    return judge_isolation(PLACE, mixed, good, steady=steady)


LOAD_TIMEOUT_S = 120.0
LARGEST = 4096  # As the table's CHECK says.
TASKS = {"complete": Task.COMPLETE, "embed": Task.EMBED}


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


def check_model(settings: "Settings", options: ModelCheckOptions, output: str, actor: str | None) -> int:
    """Run it to its exit code: 0 where nothing is wrong. Raises UsageError and VerbError, which are one sentence."""
    call = VerbCall(settings, output, actor=actor)
    actor_of(call)  # A bad actor is rejected before minutes of measurements.

    async def work(call: VerbCall) -> int:
        if output == "table":
            typer.echo(f"model {options.spec}")
        report = await _report(call.settings, options, _shown if output == "table" else _kept)
        await _tell(call, options, report)
        return 0 if report.ok else 1

    return run_verb(work, call)


def _shown(finding: ModelFinding) -> None:
    typer.echo("\n".join(finding_lines(finding)))


def _kept(finding: ModelFinding) -> None:
    """Programs get the whole at the end."""


async def _report(settings: "Settings", options: ModelCheckOptions, tell: Callable[[ModelFinding], None]) -> Report:
    secrets = secrets_of(options.spec, Access(**settings.endpoint_values))
    threads = settings.torch_threads or default_torch_threads(options.spec)
    launch = ModelLaunch(options.spec, settings.device, threads, settings.dtype, secrets)
    parameters: dict[str, object] = {"temperature": 0, "max_tokens": options.max_tokens}
    request = ProbeRequest(
        parameters if options.task == "complete" else {},
        TASKS[options.task],
        float(settings.gpu_timeout_ms),
        float(settings.request_limits(limits_of_backend(options.spec)).total_ms),
    )
    probe = Probe(launch, request, LOAD_TIMEOUT_S)
    try:
        findings = []
        async for finding in examine(probe, options.poison):
            findings.append(finding)
            tell(finding)
        if not any(finding.name == "length" for finding in findings):  # It does not load, or answers nothing.
            return Report(options.spec, probe.version, findings, [], None)
        timing = await measure(probe, options.sizes, TEXTS if options.text is None else [options.text])
        tell(timing.finding)
    finally:
        await probe.close()
    return Report(options.spec, probe.version, [*findings, timing.finding], timing.timed, suggest(timing.timed))


async def _tell(call: VerbCall, options: ModelCheckOptions, report: Report) -> None:
    written = options.write if options.write is not None and report.ok and report.suggestion is not None else None
    if call.output == "table":
        typer.echo("\n".join(summary(report)))
    done = await _write(call, written, report.suggestion) if written and report.suggestion else None
    if call.output == "json":
        print_json(document(report, written))
    elif done is not None:
        typer.echo("\n".join(["", *lines_of(done, dry_run=False)]))
    elif options.write is not None:
        typer.echo(f"\nNothing was written to model {options.write}: first make good what is wrong.")


async def _write(call: VerbCall, name: str, suggestion: Suggestion) -> ChangeResult:
    """Set the row as `tierlane model set` would."""
    values = {column: getattr(suggestion, column) for column in ("max_batch_size", "max_wait_ms", "rps_per_gpu")}
    async with database(call.settings, APPLICATION) as connection, changing(connection, actor_of(call), dry_run=False):
        return ChangeResult([await alter(connection, models, await find(connection, models, name), values)])
