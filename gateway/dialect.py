"""How one door speaks: what its bodies say, and what its 200 looks like. Behind all doors is the same handler."""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.answer import Answer
from gateway.inference_body import InferenceBody, decode_inference
from gateway.success import success
from scheduler.replies import Reply


@dataclass(frozen=True, slots=True)
class Dialect:
    """`read`: from a body and the most bytes of an input to what is asked; raises RequestError, with the field's own name.

    `model_field` is what it calls the model. `write`: the answer, from the reply, the tier, the gateway's own latency (ms)
    and more header lines.
    """

    read: Callable[[bytes, int], InferenceBody]
    write: Callable[[Reply, str, float, str], Answer]
    model_field: str = "model"


INFERENCE = Dialect(decode_inference, success)
