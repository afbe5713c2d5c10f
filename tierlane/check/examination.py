"""The batches that show whether a model keeps its contract, in order, and the findings about them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from gpu_pool.worker.slow_model import TRIAL_CAPS
from scheduler.errors import ErrorCode
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from tierlane.check.judgements import (
    BLAMED,
    LONGER,
    NOT_TESTED,
    OF_SLOTS,
    judge_answered,
    judge_determinism,
    judge_isolation,
    judge_kind,
    judge_length,
    judge_method,
    judge_odd,
    judge_order,
    judge_parameters,
    judge_slot_time,
    judge_stream_time,
    judge_time,
    judge_wrong_values,
)
from tierlane.check.model_probe import NotLoaded, Probe
from tierlane.check.model_report import ModelFinding, fails, holds, undetermined

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
CHAT = (PromptMessage("system", "Answer in one line."), PromptMessage("user", "Why do rivers run?"))
METHODS = (
    ("texts", Task.COMPLETE, False),
    ("stream", Task.COMPLETE, True),
    ("chat", Task.CHAT, False),
    ("embed", Task.EMBED, False),
)
"""Each way in which requests reach a model: its name in findings, the task, and whether a client reads along."""
UNKNOWN = {"check": True}
"""A parameter that no model knows."""

WRONG_VALUES: Mapping[str, object] = {"temperature": "hot", "max_tokens": "many"}
"""Common parameters with values of a wrong type."""
REST = ("order", "determinism", "stream", "chat", "embed", "parameters", *ODD, "isolation", "sizes")
"""The findings that say nothing about a model whose plain answers are wrong."""

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
    yield judge_answered(together, OF_SLOTS if probe.has_slots else LONGER)
    if together.hung or not together.lost:
        # The time is measured also if it is over cap and deadline.
        first = await probe.ask(TEXTS[:1], caps=TRIAL_CAPS)
        if probe.has_slots:
            yield judge_slot_time(first, probe.limit)
        else:
            yield judge_time(first, probe.request.timeout_ms, probe.request.total_ms)
    if together.lost or together.too_long:
        return
    steady = judge_determinism(together, await probe.ask(TEXTS))
    alone = [await probe.ask([text]) for text in TEXTS]
    basic = (judge_length([together, *alone]), judge_kind(together))
    failed = next((place for place, finding in enumerate(basic) if finding.ok is False), None)
    if failed is not None:
        for finding in basic[: failed + 1]:
            yield finding
        for name in ("type", *REST)[failed:]:
            yield undetermined(name, NOT_TESTED)
        return
    for finding in (*basic, judge_order(together, alone), steady):
        yield finding
    async for finding in _examine_methods(probe):
        yield finding
    async for finding in _examine_odd(probe, poison, together.outputs, steady=steady.ok is True):
        yield finding


async def _examine_odd(
    probe: Probe, poison: str | None, outputs: Sequence[str | None], *, steady: bool
) -> AsyncIterator[ModelFinding]:
    """Unusual inputs, and one that the model fails on among good ones, which have these `outputs` without it."""
    bad = poison
    for name, text in ODD.items():
        answer = await probe.ask([text])
        if probe.has_slots and answer.too_long and not answer.lost:
            yield undetermined(name, f"no result in {probe.timeout_ms / 1000:,g} s, stopped: {probe.limit}")
        else:
            yield judge_odd(name, answer)
        # An input that the model was seen to fail on without taking the process along.
        if bad is None and any(result.error_code in BLAMED for result in answer.results):
            bad = text
    if bad is None:
        yield undetermined("isolation", "no input is known that the model raises on; name one with --poison")
        return
    mixed = await probe.ask([*TEXTS[:PLACE], bad, *TEXTS[PLACE:]])
    good = {place + (place >= PLACE): output for place, output in enumerate(outputs)}
    yield judge_isolation(PLACE, mixed, good, steady=steady)


async def _examine_methods(probe: Probe) -> AsyncIterator[ModelFinding]:
    """Every other way in which requests reach the model, and a parameter that it does not know."""
    main = probe.request
    try:
        for name, task, stream in METHODS:
            if task is main.task and not stream:
                continue
            kept = {} if Task.EMBED in (task, main.task) else main.parameters
            probe.request = replace(main, task=task, parameters=kept)
            texts = [encode_messages(list(CHAT))] if task is Task.CHAT else TEXTS[:2]
            answer = await probe.ask(texts, stream=stream)
            if stream and any(result.error_code == ErrorCode.DEADLINE_EXCEEDED for result in answer.results):
                yield judge_stream_time(await probe.ask(texts, caps=TRIAL_CAPS, stream=True), probe.total_ms)
            else:
                yield judge_method(name, answer)
        probe.request = replace(main, parameters={**main.parameters, **UNKNOWN})
        yield judge_parameters(await probe.ask(TEXTS[:1]))
        probe.request = replace(main, parameters=dict(WRONG_VALUES))
        if (note := judge_wrong_values(await probe.ask(TEXTS[:1]), WRONG_VALUES)) is not None:
            yield note
    finally:
        probe.request = main
