"""gRPC without a server: any bytes are read or rejected, frames of a stream, addresses of peers, trailing metadata."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference.tensors import TensorRequest
from gateway.grpc.call import address_of, trailers
from gateway.grpc.messages import framed, messages_of, read_message
from gateway.grpc.open_inference_pb2 import InferParameter, InferTensorContents, ModelInferRequest
from gateway.http.response import HttpResponse
from scheduler.errors import ErrorCode, RequestError

MOST = 100
PARAMETERS = st.builds(
    InferParameter,
    bool_param=st.none() | st.booleans(),
    double_param=st.none() | st.floats(),
    string_param=st.none() | st.text(max_size=5),
    uint64_param=st.none() | st.integers(0, 2**64 - 1),
)
NAMES = st.sampled_from(["max_tokens", "temperature", "service_tier", "sequence_id", "triton_final_response", "x" * 70])
TENSORS = st.builds(
    ModelInferRequest.InferInputTensor,
    name=st.sampled_from(["text_input", "stream"]),
    datatype=st.sampled_from(["BYTES", "FP32"]),
    shape=st.lists(st.integers(-1, 3), max_size=3),
    contents=st.none() | st.builds(InferTensorContents, bytes_contents=st.lists(st.binary(max_size=3), max_size=3)),
)
MESSAGES = st.builds(
    ModelInferRequest,
    model_name=st.just("tiny"),
    id=st.text(max_size=5),
    inputs=st.lists(TENSORS, max_size=2),
    parameters=st.dictionaries(NAMES, PARAMETERS, max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=8), max_size=2),
)


def known(model: str, version: str) -> None:
    """Every model exists."""


@given(st.binary(max_size=64) | MESSAGES.map(lambda message: message.SerializeToString()))
def test_any_message_is_read_or_rejected(raw: bytes) -> None:
    """With an error of the client's, never another exception; what is read has texts and the shape of them."""
    try:
        request = read_message(known, raw, MOST, stream=True)
    except RequestError as error:
        assert error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.REQUEST_TOO_LARGE)  # noqa: PT017
    else:
        assert isinstance(request, TensorRequest)
        assert request.shape[0] == 1 + len(request.more)
        assert request.stream is not bool(request.more)
        assert all((request.input, *request.more))


@given(st.lists(st.binary(max_size=300)))
def test_frames(messages: list[bytes]) -> None:
    """Parts that are sent together are the same messages."""
    assert messages_of(b"".join(map(framed, messages))) == messages


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:50051", "127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "::1"),
        ("ipv6:[2001:db8::1]:50051", "2001:db8::1"),
        ("unix:/run/gateway.sock", None),
        ("", None),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str | None) -> None:
    """The throttle of failed authentications counts it."""
    assert address_of(peer) == address


@pytest.mark.parametrize("error", [None, RequestError(ErrorCode.QUEUE_FULL)])
def test_trailing_metadata(error: Any) -> None:
    """Names in lower case, as gRPC requires, without those of HTTP itself."""
    response = HttpResponse(200, b"", [("Retry-After", "1"), ("WWW-Authenticate", "Bearer")])
    response.lines = 'x-request-id: req_1\r\nServer-Timing: queue;dur=1.0\r\nRateLimit: "requests";r=1;t=2\r\n'
    code = {} if error is None else {"error-code": "queue_full"}

    found = dict(trailers(response, error))

    assert found == {"retry-after": "1", "x-request-id": "req_1", "ratelimit": '"requests";r=1;t=2', **code}
