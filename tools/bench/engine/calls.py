"""Requests and responses of the engine in OpenAI's form, without I/O.

The text of an output depends on its prompt and length alone (`output_text`), so that a reader notices tokens that are lost,
doubled, or of another request.
"""

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from engine.faults import MARK
from engine.steps import Sequence

MOST_TOKENS = 32_768
"""The longest output, which also bounds the write buffer of a client that does not read."""
CHARACTERS_PER_TOKEN = 4
MOST_SEQUENCES = 1024

_WORDS = [b"", b"", *(b" %d" % number for number in range(2, 4097))]
_ALL_WORDS = b"".join(_WORDS)
_ENDS = list(accumulate(map(len, _WORDS)))
_ERROR = b'{"error":{"message":"%b","type":"%b","param":null,"code":%d}}'
_encode = msgspec.json.encode


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    priority: int = 0
    n: int = 1


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[str]


_chat = msgspec.json.Decoder(_ChatBody)
_completion = msgspec.json.Decoder(_CompletionBody)


class BadRequest(Exception):
    """A body that is answered with `status`."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


def output_text(prompt: str, length: int) -> str:
    """The output of `length` tokens for a prompt; for a chat its last message."""
    return (fingerprint(prompt) + _words(length)).decode()


def fingerprint(prompt: str) -> bytes:
    """The first token of the output."""
    return b"%08x" % zlib.crc32(prompt.encode("utf-8", "replace"))


def _words(length: int) -> bytes:
    """All tokens after the first."""
    if length < len(_ENDS):
        return _ALL_WORDS[: _ENDS[length]]
    return b"".join(map(_word, range(2, length + 1)))


def _word(number: int) -> bytes:
    return _WORDS[number] if number < len(_WORDS) else b" %d" % number


@dataclass(slots=True, eq=False)
class Call:
    """One request with its sequences. `connection` writes its response; `left` counts sequences that are not finished. `fault`:
    the word of its prompt that asks for one, see `faults`.
    """

    connection: Any
    number: int
    chat: bool
    stream: bool
    usage: bool
    priority: int
    prompts: list[bytes]
    sequences: list[Sequence]
    left: int
    head: bytes = b""
    fault: str = ""


def read_call(body: bytes, *, chat: bool, model: str, default_tokens: int, priorities: bool) -> Call:
    """Read a request. Raises BadRequest."""
    try:
        read: _ChatBody | _CompletionBody = (_chat if chat else _completion).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(type(error).__name__) from None
    texts = _texts(read)
    length = next((n for n in (read.max_completion_tokens, read.max_tokens) if n is not None), default_tokens)
    if not texts or not 1 <= length <= MOST_TOKENS or not 1 <= len(texts) * read.n <= MOST_SEQUENCES:
        raise BadRequest("no input, or a length or number out of range")
    if read.model not in (None, model):
        raise BadRequest("The model does not exist.", 404)
    if read.priority and not priorities:
        raise BadRequest("Got priority, but the priority scheduling policy is not enabled.")
    prompts = [text for text in texts for _ in range(read.n)]
    options = read.stream_options
    call = Call(
        connection=None,
        number=0,
        chat=chat,
        stream=bool(read.stream),
        usage=bool(options and options.include_usage),
        priority=read.priority,
        prompts=[fingerprint(text) for text in prompts],
        sequences=[],
        left=len(prompts),
        fault=texts[0].partition("-")[0] if texts[0].startswith(MARK) else "",
    )
    call.sequences = [Sequence(call, length, _tokens(read, text), index) for index, text in enumerate(prompts)]
    return call


def _texts(read: _ChatBody | _CompletionBody) -> list[str]:
    if isinstance(read, _CompletionBody):
        return [read.prompt] if isinstance(read.prompt, str) else read.prompt
    return [_text(read.messages[-1])] if read.messages else []


def _text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


def _tokens(read: _ChatBody | _CompletionBody, text: str) -> int:
    size = sum(len(_text(message)) for message in read.messages) if isinstance(read, _ChatBody) else len(text)
    return max(1, size // CHARACTERS_PER_TOKEN)


class Responses:
    """Writes the responses of one model."""

    def __init__(self, model: str, created: int) -> None:
        """`created`: UNIX seconds, the same in every response."""
        self._about = b'"created":%d,"model":%b' % (created, _encode(model))

    def prepare(self, call: Call) -> None:
        """Prepare what is equal in all events of a stream."""
        kind = b"chat.completion.chunk" if call.chat else b"text_completion"
        call.head = b'data: {"id":"%b","object":"%b",%b,"choices":[' % (self._id(call), kind, self._about)

    def event(self, call: Call, sequence: Sequence) -> bytes:
        """The events of one more token, in chunked encoding; with the last token of the call also the end."""
        text = call.prompts[sequence.index] if sequence.done == 1 else _word(sequence.done)
        ended = sequence.done == sequence.length
        reason = b'"length"' if ended else b"null"
        if call.chat:
            form = b'%b{"index":%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}]}\n\n'
        else:
            form = b'%b{"index":%d,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
        events = form % (call.head, sequence.index, text, reason)
        if call.chat and sequence.done == 1:
            role = b'%b{"index":%d,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
            events = role % (call.head, sequence.index) + events
        if not ended or call.left > 1:
            return b"%x\r\n%b\r\n" % (len(events), events)
        if call.usage:
            events += b'%b],"usage":%b}\n\n' % (call.head, self._usage(call))
        events += b"data: [DONE]\n\n"
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)

    def whole(self, call: Call) -> bytes:
        """The JSON document of a response that is not streamed."""
        choices = b",".join(self._choice(call, sequence) for sequence in call.sequences)
        kind = b"chat.completion" if call.chat else b"text_completion"
        form = b'{"id":"%b","object":"%b",%b,"choices":[%b],"usage":%b}'
        return form % (self._id(call), kind, self._about, choices, self._usage(call))

    def _choice(self, call: Call, sequence: Sequence) -> bytes:
        text = call.prompts[sequence.index] + _words(sequence.length)
        form = (
            b'{"index":%d,"message":{"role":"assistant","content":"%b"},"logprobs":null,"finish_reason":"length"}'
            if call.chat
            else b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":"length"}'
        )
        return form % (sequence.index, text)

    @staticmethod
    def _id(call: Call) -> bytes:
        return b"%b-%d" % (b"chatcmpl" if call.chat else b"cmpl", call.number)

    @staticmethod
    def _usage(call: Call) -> bytes:
        prompt = sum(sequence.prompt_tokens for sequence in call.sequences)
        output = sum(sequence.length for sequence in call.sequences)
        form = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
        return form % (prompt, output, prompt + output)


def error_event(reason: str) -> bytes:
    """The error that ends a stream, in chunked encoding."""
    event = b"data: %b\n\n" % error_document(reason, 500)
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


def error_document(reason: str, status: int) -> bytes:
    """The JSON document of an error."""
    kind = {400: b"BadRequestError", 404: b"NotFoundError", 429: b"RateLimitError"}.get(status, b"ServiceUnavailable")
    return _ERROR % (_encode(reason)[1:-1], kind, status)
