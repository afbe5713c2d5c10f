"""The objects of some types that are in memory."""

import gc
from collections.abc import Iterator


def alive(*kinds: type) -> list[object]:
    """Objects of these types and their subclasses that are not freed. Nothing is collected."""
    types = {each for kind in kinds for each in _with_subclasses(kind)}
    return [each for each in gc.get_objects() if type(each) in types]  # Millions: issubclass would take seconds.


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)
