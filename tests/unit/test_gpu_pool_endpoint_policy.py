"""What is concluded from a batch on an endpoint: back or answered, how long to leave it alone, what it does not like."""

import pytest

from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.availability import EndpointCapabilities, Pauses
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, End, Lost, Unreached
from gpu_pool.backends.openai_endpoint.requests import TOO_SLOW, HandBack, reason_of, settled, wait_asked_s
from gpu_pool.config import VARIABLE, Access, take_access

GOOD, NO = ItemResult("good", 2), ItemResult("no", 0, "invalid_request")
AWAY, LOST, CRASH = Unreached("away"), Lost("lost"), Lost("crash", by_input=True)


@pytest.mark.parametrize(
    ("ends", "handed_back"),
    [
        ([Busy(1.0), Busy(None)], HandBack("The endpoint takes no more requests for now.", counted=False)),
        ([AWAY], HandBack("away", counted=False)),
        ([Broken("key")], HandBack("key", counted=False)),
        ([NO, AWAY], HandBack("away", counted=False)),
        ([LOST], HandBack("lost", counted=True)),
        ([AWAY, CRASH], HandBack("away", counted=True)),
    ],
)
def test_a_batch_without_an_answer_goes_back(ends: list[End], handed_back: HandBack) -> None:
    """The caller's errors are found again next time; an attempt is counted where something may have run."""
    assert settled(ends, said=False) == handed_back


@pytest.mark.parametrize(
    ("ends", "said", "codes"),
    [
        ([GOOD, NO], False, ["", "invalid_request"]),
        ([NO, NO], False, ["invalid_request"] * 2),
        ([], False, []),
        ([GOOD, Busy(1.0), AWAY, Broken("x")], False, ["", "no_capacity", "no_capacity", "no_capacity"]),
        ([GOOD, LOST, CRASH], False, ["", "worker_lost", "poison_request"]),
        ([TOO_SLOW, Busy(None)], False, ["gpu_timeout", "no_capacity"]),
        ([NO, CRASH], True, ["invalid_request", "worker_lost"]),
    ],
)
def test_else_each_item_has_its_end(ends: list[End], said: bool, codes: list[str]) -> None:
    """A text is poison only where others went well."""
    found = settled(ends, said=said)

    assert not isinstance(found, HandBack)
    assert [result.error_code for result in found] == codes


def test_the_longest_wait_counts() -> None:
    """And the first reason."""
    assert wait_asked_s([Busy(1.0), Busy(None), Busy(3.0), GOOD]) == 3.0
    assert wait_asked_s([Busy(None), LOST]) is None
    assert reason_of([GOOD, LOST, AWAY]) == "lost"


def test_pauses_grow_until_a_batch_goes_well() -> None:
    """What the server asks for is taken as it is."""
    pauses = Pauses()
    assert [pauses.busy_s(asked) for asked in (None, None, 7.0, None, None, None, None, None)] == [
        0.25,
        0.5,
        7.0,
        1.0,
        2.0,
        4.0,
        8.0,
        8.0,
    ]
    assert [pauses.look_s() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert [pauses.failed() for _ in range(3)] == [False, False, True]
    pauses.worked()
    assert (pauses.failed(), pauses.busy_s(None), pauses.look_s()) == (False, 0.25, 0.25)


@pytest.mark.parametrize(
    ("waits_s", "brief"),
    [
        ([0.25], [True]),
        ([1.5], [True]),
        ([1.6], [False]),
        ([30.0, 0.25], [False, False]),
        ([0.25, 0.5, 1.0], [True, True, False]),
        ([1.0, 1.0], [True, False]),
        ([1.0, None, 1.0, 0.5, 0.05], [True, True, True, False]),
    ],
)
def test_how_long_an_endpoint_is_only_busy(waits_s: list[float | None], brief: list[bool]) -> None:
    """A second and a half in all since it last answered (None), in one pause or in many; then it is as good as away."""
    pauses, found = Pauses(), list[bool]()
    for wait_s in waits_s:
        if wait_s is None:
            pauses.worked()
        else:
            found.append(pauses.brief(wait_s))

    assert found == brief


@pytest.mark.parametrize(
    ("failures", "takes_lists"),
    [
        ([(True, True)], False),
        ([(True, False)] * 5, True),
        ([(False, True)] * 2, True),
        ([(False, True)] * 3, False),
        ([(False, True), (False, True), None, (False, True)], True),
    ],
)
def test_lists_are_given_up_where_they_are_to_blame(
    failures: list[tuple[bool, bool] | None], takes_lists: bool
) -> None:
    """Each is (refused, each text alone went well); None is a list that went well."""
    habits = EndpointCapabilities()
    for failure in failures:
        if failure is None:
            habits.list_went_well()
        else:
            habits.list_failed(refused=failure[0], alone_went_well=failure[1])

    assert habits.takes_lists is takes_lists


def test_what_a_model_process_needs_is_taken_out_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it starts itself finds the key there; and no one sees it in a repr."""
    access = Access("sk-secret", connect_ms=7)
    for name, text in access.environment().items():
        monkeypatch.setenv(name, text)

    assert take_access() == access
    assert take_access() == Access()
    assert list(access.environment()) == [VARIABLE]
    assert "sk-secret" not in repr(access)
