"""Pure functions that turn the answers of a model into findings."""

import json
import math
from collections.abc import Mapping, Sequence

from gpu_pool.backends.backend import MODEL_ERRORS
from gpu_pool.worker.slow_model import TRIAL_CAPS
from scheduler.errors import ErrorCode
from tierlane.check.model_probe import ProbeAnswer
from tierlane.check.model_report import ModelFinding, fails, holds, undetermined
from tierlane.check.model_times import ROOM, ROUND_MS, advice, shortfall

LONGER = "Raise --gpu-timeout-ms, or give the device less to do."
OF_SERVER = "See what the server wrote; docs/endpoint.md lists what each of its outcomes means for a request."
OF_SLOTS = "Lower --max-tokens, or use fewer and shorter texts: the check waits for a part of a request's time only."
"""Advice for models that are servers, and for those with slots whose answer takes long."""
NOT_TESTED = "not tested"

BLAMED = MODEL_ERRORS | {ErrorCode.GPU_TIMEOUT}
"""Codes that say that the model failed; any other one is an answer of its own, to an input that it does not take."""

RAISED = "The model raised "
"""How a fault begins that is an exception, and not an answer of the wrong form."""

LENGTH = "Return a list with exactly one answer for each input, whatever the inputs are."
KIND = "Return a str for each input; no bytes, no None, no dictionaries, and nothing that UTF-8 cannot carry."
ORDER = "Put the answers back into the order of the inputs, if you sort or group them."
RANDOM = "Fix the seed, or choose greedily at temperature 0. Leave cache_ttl_s at 0 until then."
ALONE = "Raise an exception for a bad input; let nothing of it stay behind that the next batch could see."
SURVIVE = "Catch what it is in the function: as it is, each such request costs a restart and three attempts."
REFUSE = "Handle it, or reject it with a message of your own, ModelOutput(error=...); now its customer gets 422 poison_request."
HANGS = "See above where it was at that time; if it only needs longer, raise --gpu-timeout-ms and --total-request-ms."
METHOD = "Requests of this kind call it in a worker, too. Its traceback was printed, if it raised."
PIECES = "Report exactly the text that is returned: clients of a stream get the pieces."
VALUES = "Reject such a value with ModelOutput(error='parameters.NAME must be ...'), which the customer gets."
PARAMETER = "Ignore a parameter that is not known, or reject it with ModelOutput(error='parameters.NAME ...')."


def judge_time(alone: ProbeAnswer, timeout_ms: float, total_ms: float) -> ModelFinding:
    """Whether a batch of one ends within the cap of a batch and the deadline of a request."""
    ms = alone.ms
    if alone.hung:
        waited_s = TRIAL_CAPS * timeout_ms / 1000
        return fails("time", f"no result in {waited_s:,g} s, stopped: no request can be served", HANGS)
    if alone.lost:
        return undetermined("time", "a batch of one was lost, so its time is not known")
    if why := shortfall("the model", ms, timeout_ms, total_ms):
        return fails(
            "time", f"{why}{' (stopped)' if alone.too_long else ''}: no request can be served", advice(ms, timeout_ms)
        )
    limits = (
        f"a batch may take {timeout_ms:,.0f} ms (--gpu-timeout-ms), a request {total_ms:,.0f} ms (--total-request-ms)"
    )
    return holds("time", f"a batch of one takes {ms:,.0f} ms; {limits}")


def judge_slot_time(alone: ProbeAnswer, limit: str) -> ModelFinding:
    """Whether a request in a slot ends within the time that the check waits. `limit`: its deadline, as a clause."""
    if alone.hung or alone.too_long:
        return fails("time", f"no result, stopped: {alone.wrong} {limit}", HANGS if alone.hung else OF_SLOTS)
    if alone.lost:
        return undetermined("time", "the request was lost, so its time is not known")
    return holds("time", f"a request alone takes {alone.ms:,.0f} ms; {limit}")


def judge_stream_time(stream: ProbeAnswer, total_ms: float) -> ModelFinding:
    """The finding about a stream that its deadline broke off, from one that had more time."""
    needed_ms = math.ceil(ROOM * stream.ms / ROUND_MS) * ROUND_MS
    said = f"a stream takes {stream.ms:,.0f} ms, over TIERLANE_TOTAL_REQUEST_MS = {total_ms:,.0f}: it breaks off"
    if stream.wrong:
        return fails("time", f"a stream has not ended after {TRIAL_CAPS * total_ms:,.0f} ms: it breaks off", HANGS)
    return fails("time", said, f"Set TIERLANE_TOTAL_REQUEST_MS={needed_ms}, or return shorter texts.")


def judge_wrong_values(answer: ProbeAnswer, values: Mapping[str, object]) -> ModelFinding | None:
    """A note if the model raises on common parameters with values of a wrong type; None if it does not."""
    if not answer.lost and all(result.error_code not in BLAMED for result in answer.results):
        return None
    sent = ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items())
    return ModelFinding("values", None, f"it fails on {sent}: {answer.wrong}", VALUES)


def judge_answered(together: ProbeAnswer, longer: str = LONGER) -> ModelFinding:
    """Whether a plain batch was answered at all. `longer`: the advice if it took too long."""
    if together.too_long:
        return fails("answers", together.wrong, longer)
    if together.lost:
        return fails("answers", together.lost, SURVIVE)
    if together.fault.startswith(RAISED):
        return fails("answers", together.fault, "Its traceback was printed.")
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


def judge_method(name: str, answer: ProbeAnswer) -> ModelFinding:
    """Whether requests of another kind are answered; a model may reject all of a kind."""
    if answer.lost:
        return fails(name, answer.lost, LONGER if answer.hung else SURVIVE)
    for result in answer.failed:
        if result.error_code in BLAMED:
            return fails(name, answer.fault or f"{result.error_code}: {result.output}", METHOD)
        return undetermined(name, f"rejected with {result.error_code}: {result.output}")
    outputs = answer.outputs
    if any(not (outputs[place] or "").startswith(text) for place, text in answer.pieces.items()):
        return fails(name, "the text that was streamed is not that which was returned", PIECES)
    streamed = "answered, the text as it is written" if answer.pieces else "answered"
    return holds(name, f"{streamed}, in {answer.ms:.1f} ms")


def judge_parameters(answer: ProbeAnswer) -> ModelFinding:
    """Whether a parameter that the model does not know is accepted, or rejected in good form."""
    if answer.lost:
        return fails("parameters", answer.lost, LONGER if answer.hung else SURVIVE)
    for result in answer.failed:
        if result.error_code in BLAMED:
            return fails("parameters", answer.fault or result.output, PARAMETER)
        return holds("parameters", f"an unknown one is rejected: {result.output}")
    return holds("parameters", "an unknown one is accepted")


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
