"""The description of the Open Inference Protocol, whose errors have a form of their own."""

from dataclasses import replace
from typing import Any

from gateway.api.open_inference.endpoints import INFER
from gateway.api.open_inference.error_form import PlainError
from gateway.api.open_inference.metadata import ModelMetadata, ModelReady, ServerLive, ServerMetadata, ServerReady
from gateway.api.open_inference.rest_tensors import BINARY, JSON_LENGTH, TensorBody, TensorResponse
from gateway.api.open_inference.tensors import TEXT_INPUT, TEXT_OUTPUT
from gateway.http.response import JSON
from gateway.openapi.endpoint_kinds import account_endpoint, inference_endpoint, probe_endpoint
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.schemas import NOT_EMPTY
from scheduler.errors import ErrorCode

MODEL_NAME = Parameter(
    "id",
    "path",
    "The name of the model, which may contain slashes; `/versions/1` may follow. There are no other versions.",
    NOT_EMPTY,
)
_TENSORS = inference_endpoint(
    INFER,
    TensorBody,
    TensorResponse,
    "Run a model on a tensor of texts (Open Inference Protocol)",
    example={
        "inputs": [{"name": TEXT_INPUT, "datatype": "BYTES", "shape": [1], "data": ["Once upon a time"]}],
        "parameters": {"max_tokens": 16},
    },
    parameters=(MODEL_NAME,),
    description=(
        f"The input tensor is `{TEXT_INPUT}`, the output tensor `{TEXT_OUTPUT}`: BYTES with shape [N] or [N, 1], of N texts. "
        f"With the header `{JSON_LENGTH}` the data may be binary, behind the JSON."
    ),
)
OPEN_INFERENCE: tuple[ApiEndpoint, ...] = tuple(
    replace(endpoint, error=PlainError)
    for endpoint in (
        replace(
            _TENSORS,
            responses={
                200: replace(
                    _TENSORS.responses[200],
                    content={JSON: TensorResponse, BINARY: Any},
                    optional_headers=(*_TENSORS.responses[200].optional_headers, JSON_LENGTH),
                )
            },
        ),
        account_endpoint(
            "/v2/models/{id...}",
            "Read the tensors of a model (Open Inference Protocol)",
            ModelMetadata,
            ErrorCode.MODEL_NOT_FOUND,
            parameters=(MODEL_NAME,),
        ),
        account_endpoint(
            "/v2/models/{id...}/ready",
            "Readiness of a model (Open Inference Protocol)",
            ModelReady,
            ErrorCode.MODEL_NOT_FOUND,
            parameters=(MODEL_NAME,),
        ),
        probe_endpoint("/v2", "Name and version of the server", {200: ("The server.", ServerMetadata)}),
        probe_endpoint("/v2/health/live", "Liveness of the process", {200: ("The process is alive.", ServerLive)}),
        probe_endpoint(
            "/v2/health/ready",
            "Readiness for traffic",
            {200: ("Ready.", ServerReady), 503: ("Not ready.", ServerReady)},
        ),
    )
)
