"""When a model counts as too slow for the cap of a batch, when the next trial is due, and what a trial runs."""

import asyncio

import pytest

from eventually import eventually
from gpu_pool.worker.slow_model import TRIAL_TEXT, SlowModel, Trials, trial_body
from scheduler.payload import Payload, Task, decode_payload, encode_payload
from scheduler.prompt_messages import decode_messages

CAP_MS = 3000.0


def played(events: str) -> tuple[SlowModel, list[float]]:
    """The model after these events, and the pause before each trial that became due.

    g: a batch in time; A: a new request alone reached the cap; b: another batch did; p: a trial in time; F: a trial over
    the cap; l: a trial whose process was lost.
    """
    model, pauses = SlowModel(CAP_MS), list[float]()
    for event in events:
        before = model.slow
        if event == "g":
            model.ended_in_time()
        elif event in "Ab":
            model.reached_cap(CAP_MS, alone=event == "A")
        else:
            model.trial_ended({"p": 20.0, "F": 3500.0, "l": None}[event])
        if model.slow and (not before or event in "Fl"):
            pauses.append(model.pause_s)
    return model, pauses


@pytest.mark.parametrize(
    ("events", "slow", "pauses"),
    [
        ("AgAgbg", False, []),  # Single slow batches among good ones.
        ("A", False, []),
        ("AA", True, [0]),  # The first trial runs at once,
        ("bb", True, [0]),
        ("AAFFFFF", True, [0, 10, 20, 40, 60, 60]),  # the next after growing pauses,
        ("AAFFl", True, [0, 10, 20, 40]),  # also if its process was lost.
        ("AAp", False, [0]),
        ("AApA", True, [0, 10]),  # The trial was not typical: one request is sufficient now.
        ("AApApApA", True, [0, 10, 20, 40]),
        ("bbpb", False, [0]),  # A large batch, or a request that runs again, is not,
        ("bbpbb", True, [0, 0]),  # and is always followed by a trial at once.
        ("AAFFpgA", False, [0, 10, 20]),  # A batch in time ends all of this.
        ("AAFFpgAA", True, [0, 10, 20, 0]),
        ("F", True, [10]),  # The trial at the start of the worker.
        ("pA", False, []),
        ("l", False, []),
    ],
)
def test_when_a_model_counts_as_slow(events: str, slow: bool, pauses: list[float]) -> None:
    """After two batches in a row at the cap, until a trial ends in time."""
    model, found = played(events)

    assert (model.slow, found) == (slow, pauses)


@pytest.mark.parametrize(("events", "ms"), [("g", 0), ("A", 3000), ("AAF", 3500), ("AAFp", 20), ("AAFl", 3500)])
def test_the_time_that_is_reported(events: str, ms: float) -> None:
    """The last measured time of a batch at the cap or of a trial."""
    assert played(events)[0].model_ms == ms


@pytest.mark.parametrize(
    ("events", "confirmed"),
    [("AA", False), ("AAF", True), ("AAl", False), ("AAFl", True), ("AAFp", False), ("AApA", True)],
)
def test_slow_is_reported_when_a_trial_has_reached_the_cap(events: str, confirmed: bool) -> None:
    """Until then the requests of others wait: an input that hangs fails no other request."""
    assert played(events)[0].confirmed == confirmed


def test_a_trial_has_the_task_of_a_request_and_nothing_else_of_it() -> None:
    """Neither a text nor a `max_tokens` of one customer decides whether all others are served."""
    chat = decode_payload(trial_body(encode_payload(Payload("m", "[]", {"max_tokens": 9}, Task.CHAT))))
    nothing_known = decode_payload(trial_body(b""))

    assert (chat.model, chat.parameters, chat.task) == ("m", {}, Task.CHAT)
    assert [message.content for message in decode_messages(chat.input)] == [TRIAL_TEXT]
    assert (nothing_known.input, nothing_known.parameters, nothing_known.task) == (TRIAL_TEXT, {}, Task.COMPLETE)


async def test_a_trial_over_the_cap_is_reported_before_it_ends() -> None:
    """The first trial of a worker: it is not usable until then, and slow as soon as the cap is reached."""
    model, ready, trial = SlowModel(20.0), asyncio.Event(), asyncio.get_running_loop().create_future()
    limits: list[float] = []

    async def run(_: bytes, limit_ms: float) -> float | None:
        limits.append(limit_ms)
        return await trial

    trials = Trials(model, run, ready, lambda: None, at_start=True)
    task = asyncio.create_task(trials.run())
    assert (trials.usable.is_set(), limits) == (False, [])

    ready.set()
    await eventually(lambda: model.slow, "the model is slow")
    assert (model.model_ms, limits) == (20.0, [200.0])

    trial.set_result(15.0)
    await eventually(trials.usable.is_set, "the worker is usable")
    task.cancel()
    assert model.model_ms == 15.0
