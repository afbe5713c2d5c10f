"""Requests that are passed on whole: the stored request, and the lines of its output.

The input of such a request (a task of `DOCUMENTS`) is the client's JSON body without the fields that are the gateway's. Its
output is lines of JSON: for a whole response one line, for a stream a line for each event of the model's server. A line
is the server's object without id, model and time, which are the gateway's. So nothing that a server can send is lost,
and lines can be streamed as text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

DOCUMENT = "document"
"""The finish reason of a reply whose output is lines; the real ones are in the lines."""

ROLES = {"developer": "system"}
"""Role -> the one that is sent: OpenAI's newer name, which templates of open models do not know."""

PRIORITY = "priority"
"""A field that only some servers know. It travels as a parameter, since the tier's may replace it."""

_GATEWAYS = frozenset({"id", "object", "created", "model", "service_tier"})
"""Members of a response that the gateway sets."""

Members = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(Members)
_messages = msgspec.json.Decoder(list[Members])
_encode = msgspec.json.Encoder().encode

_CHOICES = '"choices":[{'
_NO_USAGE = ',"usage":null'


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


def text_of(content: Any) -> str:
    """The text of a message or delta; some servers send a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content) if content else ""


def arguments_of(arguments: Any) -> str:
    """The JSON of a call's arguments; some servers send an object."""
    return arguments if isinstance(arguments, str) else _encode(arguments).decode()
