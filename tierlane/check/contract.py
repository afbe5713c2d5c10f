"""The contract of a model, held against a living one: which batches are asked, and in which order."""

from collections.abc import AsyncIterator

from gpu_pool.backends.backend import ItemResult
from tierlane.check import judgement
from tierlane.check.finding import Finding, fails, holds
from tierlane.check.judgement import BLAMED
from tierlane.check.probe import Answer, NotLoaded, Probe

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


async def examine(probe: Probe, poison: str | None) -> AsyncIterator[Finding]:
    """All findings as they are made; those that rest on a failed one are left out."""
    try:
        await probe.load()
    except NotLoaded as error:
        yield fails("load", str(error), "See what the model wrote above; a worker would refuse it, too.")
        return
    yield holds("load", f"in {probe.load_s:.1f} s, version {probe.version}")
    together = await probe.ask(TEXTS)
    yield judgement.answered(together)
    if together.lost:
        return
    again = await probe.ask(TEXTS)
    steady = judgement.determinism(together, again)
    for finding in (*await _batches(probe, together), steady):
        yield finding
    odd = {}
    for name, text in ODD.items():
        odd[name] = await probe.ask([text])
        yield judgement.odd(name, odd[name])
    bad = poison if poison is not None else _raised_on(odd)
    yield await _isolation(probe, together, bad, steady=steady.ok is True)


async def _batches(probe: Probe, together: Answer) -> list[Finding]:
    alone = [await probe.ask([text]) for text in TEXTS]
    return [
        judgement.length([together, *alone]),
        judgement.kind(together),
        judgement.order(together, alone),
    ]


def _raised_on(odd: dict[str, Answer]) -> str | None:
    """An input that the model was seen to fail on without taking the process along."""
    return next((ODD[name] for name, answer in odd.items() if any(map(_blamed, answer.results))), None)


def _blamed(result: ItemResult) -> bool:
    return result.error_code in BLAMED


async def _isolation(probe: Probe, together: Answer, bad: str | None, *, steady: bool) -> Finding:
    if bad is None:
        return judgement.unknown_isolation()
    mixed = await probe.ask([*TEXTS[:PLACE], bad, *TEXTS[PLACE:]])
    good = {place + (place >= PLACE): output for place, output in enumerate(together.outputs)}
    return judgement.isolation(PLACE, mixed, good, steady=steady)
