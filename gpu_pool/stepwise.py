"""A user's model that writes step by step: `generate(list[str], tell) -> list[str]` beside its `predict`.

`tell(list[str]) -> list[bool]` is called after each step with what was added to each text, and says for each whether
anybody still wants it; a model may leave the others as they are. Once nobody wants any of them, because the clients left
or their time is over, a model that tells on all the same gets NobodyWaits, which ends the run with what was told until then.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu_pool.backends.backend import InvalidOutput, Item

Tell = Callable[[Sequence[str]], list[bool]]


class NobodyWaits(BaseException):
    """No text of the run is wanted any more; `texts` are what was told of each. Not an Exception, so that a model's own
    handler of errors does not hold it up.
    """

    def __init__(self, texts: list[str]) -> None:
        super().__init__("Nobody waits for any text of this run.")
        self.texts = texts


def teller(items: Sequence[Item], progress: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> Tell:
    """What such a model of these items calls. It raises InvalidOutput for anything but one text for each of them."""
    written = [0] * len(items)
    texts = [""] * len(items)

    unwanted = False

    def tell(pieces: Sequence[str]) -> list[bool]:
        nonlocal unwanted
        if unwanted:
            raise NobodyWaits(texts)
        if len(pieces) != len(items):
            raise InvalidOutput(f"The model told of {len(pieces)} texts for {len(items)} inputs.")
        for place, (item, piece) in enumerate(zip(items, map(_text, pieces), strict=True)):
            if item.listener is not None and piece:
                item.listener.say(written[place], piece)
                written[place] += len(piece)
                texts[place] += piece
        progress()
        wanted = [item.listener is None or not item.listener.gone for item in items]
        # Who does not read along waits as long as its own time lasts.
        unwanted = not any(
            each and (item.listener or clock() < item.until) for each, item in zip(wanted, items, strict=True)
        )
        return wanted

    return tell


def _text(piece: Any) -> str:
    """A plain str, that UTF-8 can carry. Raises InvalidOutput."""
    try:
        return str.encode(piece).decode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidOutput("The model told of a piece that is no text.") from None
