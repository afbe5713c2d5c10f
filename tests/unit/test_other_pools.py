"""`tierlane up --pools`: what it means, and what it says of nonsense."""

import pytest

from scheduler.redis_client.keys import pools_of, pools_to_serve
from tierlane.settings.pools import OtherPool, PoolsError, parse_pools


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("", []),
        ("slow=simulated:300", [OtherPool("slow", "simulated:300", 1)]),
        (" a=tiny*2 , b=hf:/models/x", [OtherPool("a", "tiny", 2), OtherPool("b", "hf:/models/x", 1)]),
        ("e=openai:http://host:8000/v1*3", [OtherPool("e", "openai:http://host:8000/v1", 3)]),
    ],
)
def test_pools_are_read(text: str, pools: list[OtherPool]) -> None:
    """In their order, one worker each unless more are wanted."""
    assert parse_pools(text, "default") == pools


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow", "'slow' is not POOL=BACKEND"),
        ("slow=", "'slow=' is not POOL=BACKEND"),
        ("sl:ow=tiny", "'sl:ow=tiny' is not"),
        ("slow=tiny*0", "workers must be from 1 to 256"),
        ("slow=tiny*999", "workers must be from 1 to 256"),
        ("a=tiny,a=tiny", "the pool 'a' is there twice"),
        ("default=tiny", "the pool 'default' is there twice"),
    ],
)
def test_nonsense_is_named(text: str, fault: str) -> None:
    """The part that is wrong is in the sentence."""
    with pytest.raises(PoolsError, match=fault.replace("*", r"\*")):
        parse_pools(text, "default")


def test_workers_have_names_of_their_own() -> None:
    """Two pools never give one name to two processes."""
    assert OtherPool("slow", "tiny", 2).names() == ["worker-slow-1", "worker-slow-2"]


def test_pools_are_those_that_can_be_asked_for() -> None:
    """A model that is switched off cannot be asked for, but its pool is served on: what waits there must end. What is no name
    is left alone: it would make keys of others.
    """

    class Row:
        def __init__(self, pool: str, *, enabled: bool = True) -> None:
            self.pool, self.enabled = pool, enabled

    rows = [Row("a"), Row("a"), Row("b", enabled=False), Row("{c}:"), Row("")]
    assert pools_of(rows) == {"a"}
    assert pools_to_serve(rows) == {"a", "b"}
