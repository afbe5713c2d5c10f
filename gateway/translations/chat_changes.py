"""What the lines of a model's server add to the first choice of a chat: text, reasoning, tool calls, the end, the usage.

Messages and responses are both made of these changes. A line may be an event of a stream or a whole response.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from scheduler.chat_document import arguments_of, text_of


class TextChange(msgspec.Struct, gc=False):
    """More text of a kind, with the log probabilities of the choice; these may come without text."""

    kind: Literal["text", "reasoning", "refusal"]
    text: str
    logprobs: Any = None


class CallChange(msgspec.Struct, gc=False):
    """A tool call that begins, if its number is new, or more of its arguments. `name` is empty where it is not sent."""

    number: int
    id: str | None
    name: str
    arguments: str


class _CalledFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: Any = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _CalledFunction | None = None


class _MessagePiece(msgspec.Struct, gc=False):
    """A message, or what an event adds to it. Servers have two names for reasoning."""

    content: Any = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _LineChoice(msgspec.Struct, gc=False):
    index: int = 0
    message: _MessagePiece | None = None
    delta: _MessagePiece | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: Any = None


class _ServerLine(msgspec.Struct, gc=False):
    choices: list[_LineChoice] = []
    usage: dict[str, Any] | None = None


_line = msgspec.json.Decoder(_ServerLine)


class ChangeReader:
    """Reads the lines of one chat in their order, with what is known of its end. `stop_sequences`: those of the request."""

    def __init__(self, stop_sequences: Sequence[str] = ()) -> None:
        self._stop_sequences = stop_sequences
        self._named: set[int] = set()  # The numbers of the calls whose name has arrived.
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self.usage: dict[str, Any] | None = None

    def changes(self, line: str) -> list[TextChange | CallChange]:
        """The changes of a line. Raises ValueError for junk."""
        try:
            read = _line.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            raise ValueError("not a response") from None
        if read.usage is not None:
            self.usage = read.usage
        found: list[TextChange | CallChange] = []
        for choice in read.choices:
            if choice.index != 0:
                continue
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.stop_reason is not None and choice.stop_reason in self._stop_sequences:
                self.stop_sequence = choice.stop_reason
            message = choice.message or choice.delta or _MessagePiece()
            if reasoning := message.reasoning_content or message.reasoning:
                found.append(TextChange("reasoning", reasoning))
            content = message.content
            if content or choice.logprobs:
                text = content if isinstance(content, str) else text_of(content)
                found.append(TextChange("text", text, choice.logprobs))
            if message.refusal:
                found.append(TextChange("refusal", message.refusal))
            for place, call in enumerate(message.tool_calls or ()):
                function = call.function or _CalledFunction()
                name, number = function.name or "", call.index
                if number is None and choice.message:  # The calls of a whole message are complete.
                    number = place
                if number is None:  # Some servers send no index: a call with a name is a new one.
                    number = len(self._named) if name or not self._named else len(self._named) - 1
                if name:
                    self._named.add(number)
                found.append(CallChange(number, call.id, name, arguments_of(function.arguments or "")))
        return found
