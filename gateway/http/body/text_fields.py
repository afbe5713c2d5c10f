"""Checks of the fields of a body that have one text or several."""

from typing import Any

from gateway.http.body.reading import too_large
from gateway.http.validation import invalid


def check_text(name: str, text: str, max_bytes: int) -> None:
    """Raises RequestError for an empty or too large text of the field `name`."""
    if not text:
        raise invalid(name, f"`{name}` must not be empty.")
    # A character has one to four bytes, so that most texts need not be encoded.
    if len(text) * 4 > max_bytes and len(text.encode()) > max_bytes:
        raise too_large(f"`{name}`", max_bytes, name)


def texts_of(name: str, value: str | list[Any], max_bytes: int, not_text: str) -> list[str]:
    """The texts of a field with one text or several, each of at most `max_bytes`.

    Raises RequestError, with the message `not_text` for an item that is not a string.
    """
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise invalid(name, f"`{name}` must not be empty.")
    if any(not isinstance(text, str) for text in texts):
        raise invalid(name, not_text)
    for text in texts:
        check_text(name, text, max_bytes)
    return texts
