"""From stored bodies to a model's items."""

from gpu_pool.model_process.inputs import read_items
from scheduler.payload import Payload, Task, encode_payload


class Deaf:
    """A listener for items that nobody reads along."""

    gone = late = False

    def say(self, offset: int, text: str) -> None:
        raise AssertionError


def test_an_item_has_all_that_was_stored_of_it() -> None:
    """Input, parameters, task, deadline, and its tier's priority; one that cannot be read is None at its place."""
    stored = Payload("m", "hello", {"seed": 1}, Task.CHAT).on_its_way("", 3)

    item, unreadable = read_items([encode_payload(stored), b"junk"], lambda place, address, until: Deaf(), [5.0, 6.0])

    assert unreadable is None
    assert item is not None
    assert (item.input, item.parameters, item.task) == ("hello", {"seed": 1}, Task.CHAT)
    assert (item.until, item.priority, item.listener) == (5.0, 3, None)
