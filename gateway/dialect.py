"""How one door speaks: what its bodies say, and what its 200 looks like. Behind all doors is the same handler."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.format import Asked, Served
from gateway.api.inference import read_inference
from gateway.api.stream_chunks import MakeChunks
from gateway.http.response import Answer
from gateway.success import success
from scheduler.errors import ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class Dialect:
    """`read`: from a body and the most bytes of an input to what is asked; raises RequestError, with the field's own name.

    `chunks`: makes the events of a stream, where there may be one. `input_field` and `model_field` are what it calls these two; `flat`: parameters are fields of the body itself. `endpoint`: its address, as it is counted.
    `write`: the answer to what was completed.
    """

    read: Callable[[bytes, int], Asked]
    write: Callable[[Served], Answer]
    input_field: str = "input"
    model_field: str = "model"
    flat: bool = False
    chunks: MakeChunks | None = None
    endpoint: str = "/v1/inference"

    def bad_parameters(self, sentence: str) -> RequestError:
        """What the model says of the parameters, which it knows as `parameters.<name>`, in this door's words."""
        if not self.flat:
            return RequestError(ErrorCode.INVALID_REQUEST, sentence, "parameters")
        own = sentence.removeprefix("parameters.")
        return RequestError(ErrorCode.INVALID_REQUEST, own, None if own == sentence else own.partition(" ")[0])


INFERENCE = Dialect(read_inference, success)
