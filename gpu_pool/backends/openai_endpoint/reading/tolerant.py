"""Reads JSON of servers that differs from OpenAI's format without harm: counts as floats, null for empty, halves of characters.

Used only for what cannot be read as it is. The result has the types that OpenAI documents; a value that has no meaning there is
omitted.
"""

import json
import math
import re
from typing import Any

_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_COUNT, _GROUP = "_tokens", "_details"
"""The ends of the names of counts, and of groups of them."""
_TEXTS = frozenset({"content", "reasoning", "reasoning_content", "refusal", "text"})

Path = tuple[str | int, ...]


def has_escaped_halves(data: bytes) -> bool:
    """Whether the JSON has an escaped surrogate (RFC 8259, section 7). A lone one is no character, and msgspec rejects it."""
    return b"\\u" in data and _ESCAPED_HALF.search(data) is not None


class TolerantReader:
    """The objects of one response. A surrogate pair whose halves are in two events is joined; a lone half becomes U+FFFD."""

    def __init__(self) -> None:
        self._halves: dict[Path, str] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a text ends with the first half of a pair, so that the next event must be read here."""
        return bool(self._halves)

    def read(self, data: bytes) -> dict[str, Any] | None:
        """The object with OpenAI's types; None for anything but an object."""
        try:
            document = json.loads(data.decode("utf-8", "replace"), parse_constant=lambda _: None, strict=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict):
            return None
        choices = document.get("choices")
        found = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
        document["choices"] = [self._choice(choice, at) for at, choice in enumerate(found)]
        usage = document.get("usage")
        if usage is not None:
            document["usage"] = _counts(usage) if isinstance(usage, dict) else None
        try:
            return {name: _whole(value) for name, value in document.items()}
        except RecursionError:
            return None

    def _choice(self, choice: dict[str, Any], at: int) -> dict[str, Any]:
        index = choice["index"] = _count(choice.get("index"), at)
        for name in ("delta", "message"):
            if name in choice:
                choice[name] = self._message(choice[name], (index, name))
        if "text" in choice:
            text = choice["text"]
            choice["text"] = self._joined(text, (index, "text")) if isinstance(text, str) else None
        reason = choice.get("finish_reason")
        choice["finish_reason"] = reason if isinstance(reason, str) else None
        if not reason:
            return choice
        # Nothing of this choice follows: each half that is left is replaced.
        for path in [path for path in self._halves if path[0] == index]:
            del self._halves[path]
            if path[1:] == ("text",):
                choice["text"] = (choice.get("text") or "") + "\ufffd"
            elif isinstance(key := path[-1], str):
                message = choice[str(path[1])] = choice.get(str(path[1])) or {}
                message[key] = (message.get(key) or "") + "\ufffd"
        return choice

    def _message(self, message: Any, path: Path) -> dict[str, Any] | None:
        if not isinstance(message, dict):
            return None if message is None else {}
        for name in _TEXTS & message.keys():
            value = message[name]
            if isinstance(value, str):
                message[name] = self._joined(value, (*path, name))
            elif name == "content" and isinstance(value, list):
                message[name] = [part for part in value if isinstance(part, dict)]
            else:
                message[name] = None
        if "tool_calls" in message:
            calls = message["tool_calls"]
            found = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
            for at, call in enumerate(found):
                index = _count(call.get("index"), at)
                if "index" in call:
                    call["index"] = index
                if not isinstance(call.get("id"), str | None):
                    call["id"] = str(call["id"])
                function = call.get("function")
                if not isinstance(function, dict):
                    call.pop("function", None)
                    continue
                if not isinstance(function.get("name"), str | None):
                    function["name"] = None
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = self._joined(function["arguments"], (*path, index))
            message["tool_calls"] = found or None
        return message

    def _joined(self, text: str, path: Path) -> str:
        """The text after the half that came before; a half at its end is kept for the next event."""
        text = self._halves.pop(path, "") + text
        if "\ud800" <= text[-1:] <= "\udbff":
            self._halves[path] = text[-1]
            text = text[:-1]
        return _characters(text)


def _characters(text: str) -> str:
    """The text with pairs joined and lone halves replaced (Unicode 3.9)."""
    if _HALF.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _whole(value: Any) -> Any:
    """The value without halves in any text."""
    if isinstance(value, str):
        return _characters(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_characters(name): _whole(each) for name, each in value.items()}
    return value


def _count(value: Any, otherwise: int) -> int:
    """8.0 is 8: JSON has one kind of number (RFC 8259, section 6)."""
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts of tokens, also of groups; null for what cannot be used as one."""
    found: dict[str, Any] = {}
    for name, value in usage.items():
        if isinstance(value, dict):
            found[name] = _counts(value) if name.endswith(_GROUP) else value
        elif name.endswith(_COUNT):
            count = _count(value, -1)
            found[name] = None if count < 0 else count
        else:
            found[name] = None if name.endswith(_GROUP) else value
    return found
