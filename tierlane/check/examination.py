"""The batches that show whether a model keeps its contract, in order, and the findings about them."""

from collections.abc import AsyncIterator
from dataclasses import replace

from gpu_pool.worker.slow_model import TRIAL_CAPS
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from tierlane.check.judgements import (
    BLAMED,
    judge_answered,
    judge_determinism,
    judge_isolation,
    judge_kind,
    judge_length,
    judge_method,
    judge_odd,
    judge_order,
    judge_parameters,
    judge_time,
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
        # The time is measured also if it is over cap and deadline.
        first = await probe.ask(TEXTS[:1], caps=TRIAL_CAPS)
        yield judge_time(first, probe.request.timeout_ms, probe.request.total_ms)
    if together.lost or together.too_long:
        return
    steady = judge_determinism(together, await probe.ask(TEXTS))
    alone = [await probe.ask([text]) for text in TEXTS]
    yield judge_length([together, *alone])
    yield judge_kind(together)
    yield judge_order(together, alone)
    yield steady
    if all(not result.error_code for result in together.results):
        async for finding in _examine_methods(probe):
            yield finding
    bad = poison
    for name, text in ODD.items():
        answer = await probe.ask([text])
        yield judge_odd(name, answer)
        # An input that the model was seen to fail on without taking the process along.
        if bad is None and any(result.error_code in BLAMED for result in answer.results):
            bad = text
    if bad is None:
        yield undetermined("isolation", "no input is known that the model raises on; name one with --poison")
        return
    mixed = await probe.ask([*TEXTS[:PLACE], bad, *TEXTS[PLACE:]])
    good = {place + (place >= PLACE): output for place, output in enumerate(together.outputs)}
    yield judge_isolation(PLACE, mixed, good, steady=steady.ok is True)


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
            yield judge_method(name, await probe.ask(texts, stream=stream))
        probe.request = replace(main, parameters={**main.parameters, **UNKNOWN})
        yield judge_parameters(await probe.ask(TEXTS[:1]))
    finally:
        probe.request = main
