"""Requests that are passed on whole: the stored request, the lines of its output, and the capabilities that it needs.

The input of such a request (a task of `DOCUMENTS`) is the client's JSON body without the fields that are the gateway's. Its
output is lines of JSON: for a whole response one line, for a stream a line for each event of the model's server. A line
is the server's object without id, model and time, which are the gateway's. So nothing that a server can send is lost,
and lines can be streamed as text. `joined` makes a whole response of a stream, `as_deltas` the reverse, for replays.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec


class Capability(StrEnum):
    """A capability of a model beyond text, by the name in a row of `models` and in error messages."""

    TOOLS = "tools"
    STRUCTURED_OUTPUT = "structured_output"
    LOGPROBS = "logprobs"
    CHOICES = "choices"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    REASONING = "reasoning"
    IMAGES = "images"
    AUDIO = "audio"
    FILES = "files"
    DIMENSIONS = "dimensions"
    EXTENSIONS = "extensions"


DOCUMENT = "document"
"""The finish reason of a reply whose output is lines; the real ones are in the lines."""

PASSED_ON = frozenset(Capability) - {Capability.EXTENSIONS}
"""Capabilities of a backend that passes requests on. Unknown fields must be allowed by the row of the model."""


ENDPOINT = "endpoint"
"""Needed by fields without a capability of their own, such as `suffix`: every model with a server behind it has it."""


def capabilities(row: frozenset[str] | None, *, passes_on: bool) -> frozenset[str]:
    """The capabilities of a model: none without a server behind it; else those of its row, by default all."""
    if not passes_on:
        return frozenset()
    return (PASSED_ON if row is None else row) | {ENDPOINT}


ASSISTANT = "assistant"
ROLES = {"developer": "system"}
"""Role -> the one that is sent: OpenAI's newer name, which templates of open models do not know."""

PRIORITY = "priority"
"""A field that only some servers know. It travels as a parameter, since the tier's may replace it."""

_GATEWAYS = frozenset({"id", "object", "created", "model", "service_tier"})
"""Members of a response that the gateway sets."""

Members = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(Members)
_any = msgspec.json.Decoder(dict[str, Any])
_messages = msgspec.json.Decoder(list[Members])
_encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct, gc=False):
    """Tokens of the input that need not be read again."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct, gc=False):
    """Tokens of the output that are reasoning."""

    reasoning_tokens: int | None = None


class ServerUsage(msgspec.Struct, gc=False):
    """Tokens of a response. Servers that do not count omit them or send null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None


class _Called(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    """A message or delta, with the members that translations read: others than these types are found where they arrive."""

    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Called] | None = None


class _Part(msgspec.Struct, gc=False):
    """The part of a choice that shows its kind and whether it has ended."""

    index: int = 0
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class LineHead(msgspec.Struct, gc=False):
    """The parts of a line that are interpreted."""

    choices: list[_Part] = []
    usage: ServerUsage | None = None
    error: Any = None
    object: Any = None

    @property
    def is_error(self) -> bool:
        """Whether the server reports an error; the older form of vLLM and of SGLang has no `error`."""
        return bool(self.error) or self.object == "error"

    @property
    def whole(self) -> bool:
        """Whether the line has messages, not deltas."""
        return any(choice.message is not None for choice in self.choices)

    @property
    def texts(self) -> bool:
        """Whether every choice is a completion."""
        return all(choice.text is not None for choice in self.choices)


_head = msgspec.json.Decoder(LineHead)


def read_members(data: bytes | str) -> Members:
    """The members of an object, each as it is written. Raises ValueError for anything else."""
    try:
        return _members.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a JSON object") from None


def read_head(line: bytes | str) -> LineHead:
    """The interpreted parts of a line, or of a server's response. Raises ValueError for anything else."""
    try:
        return _head.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a response") from None


def output_line(response: bytes) -> str:
    """A server's response or event as a line of the output. Raises ValueError for anything but an object."""
    return line_of(read_members(response.replace(b"\n", b" ")))  # In JSON a line end is white space.


def line_of(members: Mapping[str, Any]) -> str:
    """The members of a server's response or event as a line of the output. Raises ValueError for bytes that are no text."""
    return _encode({name: value for name, value in members.items() if name not in _GATEWAYS}).decode() + "\n"


_CHOICES = '"choices":[{'
_NO_USAGE = ',"usage":null'


def usual_members(line: str) -> str | None:
    """The members of a line, as they are written, but for a usage of null. None for a line that must be decoded: one
    without choices, with messages or with usage.
    """
    at = line.find(_CHOICES)
    before = line[1:at]
    if at < 0 or "{" in before or "[" in before:
        return None
    members = line[1:-1].removesuffix(_NO_USAGE)
    # Names may be escaped.
    return None if '"usage"' in members or '"message"' in members or "\\u00" in members else members


def with_known_roles(messages: msgspec.Raw) -> msgspec.Raw:
    """The messages of a chat, each with the name of its role that servers know."""
    renamed = _messages.decode(messages)
    for message in renamed:
        role = msgspec.json.decode(message["role"])
        message["role"] = msgspec.Raw(_encode(ROLES.get(role, role)))
    return msgspec.Raw(_encode(renamed))


def lines_of(output: str) -> Iterator[str]:
    """The lines of an output, without their ends."""
    return (line for line in output.split("\n") if line)


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
            _add(choices.setdefault(index, {}), _as_message(choice))
        total |= {name: value for name, value in event.items() if value is not None or name not in total}
    return {"choices": [_finished(choices[index]) for index in sorted(choices)], **total}


def _as_message(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of an event in the form of a whole response."""
    return {("message" if name == "delta" else name): value for name, value in choice.items()}


_SET = frozenset({"index", "role", "type", "id", "finish_reason", "name", "stop_reason", "call_id"})
"""Members that are sent once or repeated, never continued."""


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


def _finished(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice: its tool calls have no index, as in a response that was not streamed."""
    message = choice.get("message")
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if isinstance(message, dict) and isinstance(calls, list):
        plain = [{k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call for call in calls]
        choice["message"] = {**message, "tool_calls": plain}
    return choice


def text_of(content: Any) -> str:
    """The text of a message or delta; some servers send a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content) if content else ""


def arguments_of(arguments: Any) -> str:
    """The JSON of a call's arguments; some servers send an object."""
    return arguments if isinstance(arguments, str) else _encode(arguments).decode()


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
