"""What is concluded from a model's answers: literal answers, literal findings."""

import pytest

from gpu_pool.backends.backend import ItemResult
from tierlane.check import model
from tierlane.check.model import ProbeAnswer
from tierlane.check.model_report import fails, holds, passed, untold

POISON = ItemResult("The model cannot process this input.", 0, "poison_request")
LOST = ProbeAnswer(lost="The model process was ended by signal 9.")


def answer(*outputs: str, fault: str = "") -> ProbeAnswer:
    return ProbeAnswer(10.0, [ItemResult(output) for output in outputs], fault)


@pytest.mark.parametrize(
    ("together", "alone", "ok", "said"),
    [
        (("a", "b", "c"), ("a", "b", "c"), True, "each answer is that of its input alone"),
        (("a", "c", "b"), ("a", "b", "c"), False, "input 2 got the answer of input 3"),
        (("c", "b", "a"), ("a", "b", "c"), False, "input 1 got the answer of input 3"),
        (("x", "x", "x"), ("x", "x", "x"), None, "all answers are equal, so their order cannot be seen"),
        (("a", "y", "c"), ("a", "b", "c"), None, "1 of 3 answers differ from those of the inputs alone"),
    ],
)
def test_order(together: tuple[str, ...], alone: tuple[str, ...], ok: bool | None, said: str) -> None:
    """Only an answer that is another input's says that they are mixed up."""
    found = model.judge_order(answer(*together), [answer(one) for one in alone])

    assert (found.ok, found.said) == (ok, said)


@pytest.mark.parametrize(
    ("second", "ok"), [(answer("a", "b"), True), (answer("a", "x"), False), (answer("x", "y"), False), (LOST, False)]
)
def test_determinism(second: ProbeAnswer, ok: bool) -> None:
    """Equal inputs, equal answers."""
    assert model.judge_determinism(answer("a", "b"), second).ok is ok


def test_length() -> None:
    """A batch that was taken apart is a fault, even where its parts went well; an exception is none of the length."""
    wrong = "The model returned 1 answers for 2 inputs."

    assert model.judge_length([answer("a", "b"), answer("a")]).ok is True
    assert model.judge_length([answer("a", "b", fault=wrong)]) == fails("length", wrong, model.LENGTH)
    assert model.judge_length([answer("a", "b"), LOST]).ok is False
    assert model.judge_answered(answer("a", fault="The model raised KeyError.")).ok is False
    assert model.judge_length([answer("a", fault="The model raised KeyError.")]).ok is True


def test_kind() -> None:
    """One answer that is no string is a fault, and its words are shown."""
    mixed = ProbeAnswer(1.0, [ItemResult("a"), ItemResult("The model's answer is not a string.", 0, "invalid_output")])

    assert model.judge_kind(answer("a", "b")).ok is True
    found = model.judge_kind(mixed)
    assert (found.ok, found.advice) == (False, model.KIND)
    assert "1 of 2 answers failed. invalid_output: The model's answer is not a string." in found.said


@pytest.mark.parametrize(
    ("came", "ok"),
    [
        (answer("yes"), True),
        (ProbeAnswer(1.0, [ItemResult("Too long.", 0, "invalid_request")]), True),
        (ProbeAnswer(1.0, [POISON], "The model raised ValueError."), False),
        (LOST, False),
    ],
)
def test_odd_inputs(came: ProbeAnswer, ok: bool) -> None:
    """Refusing an input in good form is an answer; raising and dying are not."""
    assert model.judge_odd("empty", came).ok is ok


@pytest.mark.parametrize(
    ("outputs", "steady", "ok"),
    [
        (("a", None, "b"), True, True),
        (("a", None, None), True, False),
        (("a", None, "other"), True, False),
        (("a", None, "other"), False, True),
        (("a", "fine", "b"), True, None),
    ],
)
def test_isolation(outputs: tuple[str | None, ...], steady: bool, ok: bool | None) -> None:
    """The bad one fails, and nobody beside it; where answers differ from run to run, any answer will do."""
    mixed = ProbeAnswer(1.0, [POISON if output is None else ItemResult(output) for output in outputs])

    assert model.judge_isolation(1, mixed, {0: "a", 2: "b"}, steady=steady).ok is ok


def test_a_bad_input_that_kills_the_process_is_not_isolated() -> None:
    """Its neighbours die with it."""
    assert model.judge_isolation(1, LOST, {0: "a"}, steady=True).ok is False


def test_only_a_cross_is_a_failure() -> None:
    """What could not be seen does not count against a model."""
    assert passed([holds("a", ""), untold("b", "")])
    assert not passed([holds("a", ""), fails("b", "", "")])
