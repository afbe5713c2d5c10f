"""How long after a heal the load was whole again."""

from tierlane.chaos.history import Answered, Event, FaultEvent, Invoked, Unanswered, What
from tierlane.chaos.scenario import recoveries


def _request(at: float, *, ok: bool) -> list[Event]:
    nonce = f"{at:.3f}"
    invoked = Invoked(at=at, nonce=nonce, turn=0, trace=nonce, gateway="gateway-1", tier="paid", customer="c")
    if ok:
        return [invoked, Answered(at=at + 0.1, nonce=nonce, turn=0, seconds=0.1, status=200, code="", id=nonce)]
    return [invoked, Unanswered(at=at + 0.1, nonce=nonce, turn=0, kind="reset")]


def _load(until: float, failing: tuple[float, float]) -> list[Event]:
    """A request every 50 ms; those of one interval fail."""
    times = [number / 20 for number in range(int(until * 20))]
    return [event for at in times for event in _request(at, ok=not failing[0] <= at < failing[1])]


def _heal(at: float, error: str = "") -> FaultEvent:
    return FaultEvent(at, "cut", "gateway-1>redis", What.HEAL, error=error)


def test_it_ends_with_the_first_second_in_which_everything_succeeds() -> None:
    """From the heal to the begin of that second, to a tenth."""
    found = recoveries(_load(20, failing=(9.0, 12.5)), [_heal(10.0)], 20.0)
    assert [one.seconds for one in found] == [2.5]


def test_a_fault_that_nobody_felt_takes_no_time() -> None:
    """Everything sent after the heal succeeds."""
    assert [one.seconds for one in recoveries(_load(20, failing=(9.0, 9.5)), [_heal(10.0)], 20.0)] == [0.0]


def test_none_where_the_load_ended_first() -> None:
    """What is not seen is not claimed: no second after the heal succeeded as a whole."""
    assert [one.seconds for one in recoveries(_load(20, failing=(9.0, 19.5)), [_heal(10.0)], 20.0)] == [None]


def test_a_rejection_is_no_success() -> None:
    """Only 200 counts; a pause in the load proves nothing either."""
    busy = Invoked(at=10.2, nonce="busy", turn=0, trace="t", gateway="gateway-1", tier="free", customer="c")
    told = Answered(at=10.3, nonce="busy", turn=0, seconds=0.1, status=503, code="no_capacity", id="r")
    events = [*_load(10, failing=(0, 0)), busy, told, *_request(13.0, ok=True)]

    assert [one.seconds for one in recoveries(events, [_heal(10.0)], 20.0)] == [2.1]


def test_only_faults_that_were_healed_count() -> None:
    """A begin, and a fault that could not be done, have no recovery."""
    begun = FaultEvent(10.0, "cut", "gateway-1>redis", What.START)
    assert recoveries(_load(20, failing=(0, 0)), [begun, _heal(11.0, error="It is down already.")], 20.0) == []
