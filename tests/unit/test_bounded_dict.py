"""A dict that drops its oldest entry."""

from scheduler.bounded_dict import BoundedDict


def test_a_new_key_drops_the_oldest_entry() -> None:
    """A read or write of a present key drops nothing, and does not make it newer; `move_to_end` does."""
    kept: BoundedDict[str, int] = BoundedDict(2)
    kept["a"] = kept["b"] = 1
    kept["a"] = kept.get("a", 0) + 1
    assert kept == {"a": 2, "b": 1}

    kept["c"] = 3
    assert list(kept) == ["b", "c"]

    kept.move_to_end("b")
    kept.setdefault("d", 4)
    assert list(kept) == ["b", "d"]
