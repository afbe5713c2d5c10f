"""Quarantine of a model that answers nonsense: what counts as a strike, and how long it stays away, as tables."""

import pytest

from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.supervisor import BatchVerdict, Quarantine, judge

GOOD, NONSENSE, NEITHER = "GXN"
VERDICTS = {GOOD: BatchVerdict.GOOD, NONSENSE: BatchVerdict.NONSENSE, NEITHER: BatchVerdict.NEITHER}
CODES = {"g": "", "x": "invalid_output", "p": "poison_request", "t": "gpu_timeout", "i": "invalid_request"}


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ("g", BatchVerdict.GOOD),
        ("x", BatchVerdict.NONSENSE),
        ("xx", BatchVerdict.NONSENSE),
        ("gx", BatchVerdict.NONSENSE),  # half
        ("ggx", BatchVerdict.GOOD),
        ("gxx", BatchVerdict.NONSENSE),
        ("px", BatchVerdict.NONSENSE),
        ("ppx", BatchVerdict.NEITHER),
        ("gp", BatchVerdict.GOOD),
        ("p", BatchVerdict.NEITHER),
        ("ti", BatchVerdict.NEITHER),
        ("", BatchVerdict.NEITHER),
    ],
)
def test_what_a_batch_says_of_its_model(answers: str, verdict: BatchVerdict) -> None:
    """At least half no answer at all is nonsense; else one good answer is proof that the model works."""
    assert judge([ItemResult("", 0, CODES[answer]) for answer in answers]) is verdict


@pytest.mark.parametrize(
    ("batches", "put_aside"),
    [
        ("XX", []),
        ("XXX", [5]),
        ("XXGXX", []),
        ("XXNX", [5]),  # a batch that says nothing changes nothing
        ("XXXX", [5, 10]),  # on probation: one more is enough
        ("XXXNX", [5, 10]),
        ("XXXXXXX", [5, 10, 20, 40, 60]),
        ("XXXXXXXX", [5, 10, 20, 40, 60, 60]),
        ("XXXXGX", [5, 10]),
        ("XXXXGXXX", [5, 10, 5]),  # a good batch ends probation, and the count begins anew
        ("GGGG", []),
    ],
)
def test_three_strikes_and_probation(batches: str, put_aside: list[float]) -> None:
    """Seconds of each quarantine: 5, doubling to 60 as long as no good batch comes between."""
    quarantine = Quarantine()

    seconds = [quarantine.after(VERDICTS[batch]) for batch in batches]

    assert [each for each in seconds if each] == put_aside
