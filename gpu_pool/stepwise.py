"""A user's model that writes step by step: `generate(list[str], tell) -> list[str]` beside its `predict`.

`tell(list[str]) -> list[bool]` is called after each step with what was added to each text, and says for each whether
anybody still wants it; a model may leave the others as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gpu_pool.backend import InvalidOutput, Item

Tell = Callable[[Sequence[str]], list[bool]]


def teller(items: Sequence[Item], progress: Callable[[], None]) -> Tell:
    """What such a model of these items calls. It raises InvalidOutput for anything but one text for each of them."""
    written = [0] * len(items)

    def tell(pieces: Sequence[str]) -> list[bool]:
        if len(pieces) != len(items):
            raise InvalidOutput(f"The model told of {len(pieces)} texts for {len(items)} inputs.")
        for place, (item, piece) in enumerate(zip(items, map(_text, pieces), strict=True)):
            if item.listener is not None and piece:
                item.listener.say(written[place], piece)
                written[place] += len(piece)
        progress()
        return [item.listener is None or not item.listener.gone for item in items]

    return tell


def _text(piece: Any) -> str:
    """A plain str, that UTF-8 can carry. Raises InvalidOutput."""
    try:
        return str.encode(piece).decode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidOutput("The model told of a piece that is no text.") from None
