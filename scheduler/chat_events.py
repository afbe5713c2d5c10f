"""A whole response of the events of a stream, and the reverse, for replays."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from scheduler.chat_document import Members, line_of, lines_of, read_head, read_members

ASSISTANT = "assistant"
_any = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode

_SET = frozenset({"index", "role", "type", "id", "finish_reason", "name", "stop_reason", "call_id"})
"""Members that are sent once or repeated, never continued."""


def joined(output: str) -> dict[str, Any]:
    """The whole response of an output: its one line, or the sum of its events. Raises ValueError for junk."""
    total: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in lines_of(output):
        try:
            event = _any.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            raise ValueError("not a response") from None
        for choice in event.pop("choices", None) or ():
            index = choice.get("index", 0)
            whole = {("message" if name == "delta" else name): value for name, value in choice.items()}
            _add(choices.setdefault(index, {}), whole)
        total |= {name: value for name, value in event.items() if value is not None or name not in total}
    for choice in choices.values():
        message = choice.get("message")
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(message, dict) and isinstance(calls, list):  # Without an index, as where nothing was streamed.
            plain = [{k: v for k, v in c.items() if k != "index"} if isinstance(c, dict) else c for c in calls]
            choice["message"] = {**message, "tool_calls": plain}
    return {"choices": [choices[index] for index in sorted(choices)], **total}


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Continue `total` by `more`, by the rules of OpenAI's clients. In place: a stream has thousands of events."""
    for name, value in more.items():
        before = total.get(name)
        if value is None:
            total.setdefault(name, None)
        elif before is None or name in _SET:
            total[name] = value
            if isinstance(value, list):
                total[name] = []
                _collect(total[name], value)
        elif isinstance(before, str) and isinstance(value, str):
            total[name] = before + value
        elif isinstance(before, dict) and isinstance(value, dict):
            _add(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            _collect(before, value)
        else:
            total[name] = value


def _collect(total: list[Any], more: Iterable[Any]) -> None:
    """Add items. One with an index continues the item of that index."""
    for item in more:
        index = _index(item)
        before = None if index is None else next((each for each in total if _index(each) == index), None)
        if before is None:
            total.append(item)
        else:
            _add(before, item)


def _index(item: Any) -> int | None:
    index = item.get("index") if isinstance(item, dict) else None
    return index if isinstance(index, int) else None


def as_deltas(line: str) -> Members:
    """The members of a line as an event of a stream: messages become deltas. Raises ValueError for junk."""
    members = read_members(line)
    if "message" not in line or not read_head(line).whole:
        return members
    choices = [_as_delta(choice) for choice in _any.decode(line)["choices"]]
    return {**members, "choices": msgspec.Raw(_encode(choices))}


def with_role_once(line: str, without_role: set[int]) -> str:
    """The line as an event of a stream: the first of each choice has the role, and no other, since clients join the roles.

    `without_role`: choices whose first event has not come; those of the line are removed. Raises ValueError for junk.
    """
    members = as_deltas(line)
    choices = msgspec.json.decode(members.get("choices", b"null"))
    for choice in choices or ():
        if not isinstance(choice.get("delta"), dict):
            continue
        role, index = choice["delta"].pop("role", None), choice.get("index", 0)
        if index in without_role:
            without_role.discard(index)
            choice["delta"] = {"role": role or ASSISTANT, **choice["delta"]}
    return line_of({**members, "choices": choices})[:-1]


def _as_delta(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return dict(choice)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        numbered = [{"index": at, **call} if isinstance(call, dict) else call for at, call in enumerate(calls)]
        message = {**message, "tool_calls": numbered}
    return {**{name: value for name, value in choice.items() if name != "message"}, "delta": message}
