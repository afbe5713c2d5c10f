"""The tensors of the Open Inference Protocol (KServe v2), in both its forms, and their checks.

https://github.com/kserve/open-inference-protocol. A model has one input tensor, `text_input`, and one output tensor,
`text_output`. Both are BYTES with shape [N] or [N, 1]: each element is a text, and one request of a list that is admitted
as a whole or not at all. `parameters` of the request are those of the model.
"""

from collections.abc import Sequence
from typing import Any

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.inference import Parameters, check_model, check_parameters
from gateway.http.body.text_fields import check_text
from gateway.http.validation import invalid
from scheduler.errors import ErrorCode, RequestError

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
BYTES = "BYTES"
VERSION = "1"  # Of each model: the catalog has one row per name.
MAX_ID_CHARACTERS = 256
MAX_ELEMENTS = 10_000  # More can never be admitted together; bounds the work before that is known.
_UNSUPPORTED = {
    "sequence_id": "models have no sequences",
    "sequence_start": "models have no sequences",
    "sequence_end": "models have no sequences",
    "priority": "the priority follows from the tier of the API key",
    "timeout": "set the deadline of the call in the client",
}
"""Parameters of the protocol's extensions that would change the result -> why they are rejected."""

_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Parameters that may be sent as text, because tritonclient's gRPC client cannot send a number with a fraction."""


class TensorRequest(InferenceRequest, frozen=True, gc=False):
    """A request of this protocol: also the client's own id, the shape of the tensors, and the form of the response."""

    id: str = ""
    shape: tuple[int, ...] = ()
    binary: bool = False


def tensor_request(
    model: str, request_id: str, shape: Sequence[int], texts: Sequence[str], parameters: Parameters, **fields: Any
) -> TensorRequest:
    """The request for one input tensor. Raises RequestError that names the field.

    `texts` are the elements of the tensor, which are checked already; `fields` are others of TensorRequest.
    """
    check_model("model_name", model)
    if len(request_id) > MAX_ID_CHARACTERS:
        raise invalid("id", f"`id` must not have more than {MAX_ID_CHARACTERS} characters.")
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1) or shape[0] != len(texts):
        raise invalid(
            "inputs",
            f"The shape of `{TEXT_INPUT}` must be [N] or [N, 1], and N the number of its elements ({len(texts)}).",
        )
    tier = parameters.pop("service_tier", None)
    if tier is not None and not isinstance(tier, str):
        raise invalid("parameters.service_tier", "`parameters.service_tier` must be a string.")
    for name, value in parameters.items():
        if name in _UNSUPPORTED:
            raise invalid(f"parameters.{name}", f"`parameters.{name}` is not supported: {_UNSUPPORTED[name]}.")
        if name in _NUMBERS and isinstance(value, str):
            parameters[name] = _number(name, value)
    check_parameters(parameters)
    first, *more = texts
    return TensorRequest(
        first,
        model,
        parameters,
        more=tuple(more),
        service_tier=tier,
        id=request_id,
        shape=tuple(shape),
        **fields,
    )


def _number(name: str, text: str) -> float:
    try:
        return float(text[:64])
    except ValueError:
        raise invalid(f"parameters.{name}", f"`parameters.{name}` must be a number.") from None


def check_input(names: Sequence[str], datatype: str) -> None:
    """Raises RequestError unless the only input tensor is `text_input` of BYTES."""
    if list(names) != [TEXT_INPUT]:
        raise invalid("inputs", f"`inputs` must be one tensor, `{TEXT_INPUT}`; other values belong into `parameters`.")
    if datatype != BYTES:
        raise invalid("inputs", f"The datatype of `{TEXT_INPUT}` must be {BYTES}.")


def check_outputs(names: Sequence[str]) -> None:
    """Raises RequestError if a requested output tensor does not exist."""
    if names and list(names) != [TEXT_OUTPUT]:
        raise invalid("outputs", f"`outputs` must be one tensor, `{TEXT_OUTPUT}`, or absent.")


def check_version(version: str) -> None:
    """Raises RequestError for a version that no model has; an empty one is the only one."""
    if version not in ("", VERSION):
        message = f"Models have only the version {VERSION}: leave the version out."
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, "model_version")


def texts_in(elements: Sequence[bytes | str], max_bytes: int) -> list[str]:
    """The elements as texts. Raises RequestError for one that is empty, too large, or not UTF-8."""
    if not elements:
        raise invalid("inputs", f"`{TEXT_INPUT}` must not be empty.")
    if len(elements) > MAX_ELEMENTS:
        raise invalid("inputs", f"`{TEXT_INPUT}` must not have more than {MAX_ELEMENTS} elements.")
    try:
        texts = [each if isinstance(each, str) else each.decode() for each in elements]
    except UnicodeDecodeError:
        raise invalid("inputs", f"An element of `{TEXT_INPUT}` is not valid UTF-8.") from None
    for text in texts:
        check_text(TEXT_INPUT, text, max_bytes)
    return texts


def result_parameters(result: InferenceResult) -> dict[str, Any]:
    """The `parameters` of a response: request id, tokens, and why the text of a single request ended."""
    reply = result.replies[0]
    values: dict[str, Any] = {
        "request_id": reply.id,
        "tokens_used": sum(each.tokens_used for each in result.replies),
    }
    if len(result.replies) == 1 and reply.finish_reason:
        values["finish_reason"] = reply.finish_reason
    return values
