"""One request of a trace, and the error of a trace that cannot be used."""

from typing import NamedTuple

from tierlane.connect import UsageError


class TraceError(UsageError):
    """A trace that cannot be used; the message is one sentence, with the line where a line is wrong."""


class TraceRequest(NamedTuple):
    """A request as its file has it; what the file does not have is empty.

    `at_s`: seconds on the file's own clock. `blocks`: the blocks of the prompt, by which prompts share a prefix. `failed`: the
    file has it without an answer, so that the length of one is not known.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    session: str = ""
    blocks: tuple[int, ...] = ()
    customer: str = ""
    tier: str = ""
    model: str = ""
    kind: str = ""
    failed: bool = False
