"""The OpenAPI document as a function of the endpoints: what one endpoint adds to it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from api_description import Described
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.openapi.document import openapi
from gateway.openapi.endpoint_kinds import inference_endpoint
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import only
from scheduler.errors import ErrorCode


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request body."""

    text: str
    n: int | None = None


class Result(msgspec.Struct):
    """A response body."""

    text: str


class Event(msgspec.Struct):
    """An event of a stream."""

    delta: str


def described(*endpoints: ApiEndpoint) -> tuple[Described, dict[str, Any], dict[str, Any]]:
    """The document, the first operation, and its responses with references resolved."""
    document = Described(openapi(endpoints, "1"))
    operation = next(iter(document.document["paths"][endpoints[0].template].values()))
    return document, operation, {status: document.resolved(each) for status, each in operation["responses"].items()}


def test_an_inference_endpoint() -> None:
    """Streams, further responses and parameters are declared; errors and headers are those of every inference."""
    inference = inference_endpoint(
        "/v1/new",
        Body,
        Result,
        "New",
        example={"text": "a"},
        rules={"n": only(None, 1)},
        events=Event,
        parameters=(Parameter("Prefer", "header", "`respond-async` for a job."),),
        responses={202: ResponseDescription(description="Accepted.", content={JSON: Result})},
    )
    document, operation, responses = described(inference)
    schemas = document.document["components"]["schemas"]
    content = responses["200"]["content"]

    assert content.keys() == {"application/json", EVENTS}
    assert content["application/json"] == {"schema": {"$ref": "#/components/schemas/Result"}}
    event = content[EVENTS]["schema"]["properties"]["data"]["anyOf"][0]
    names = ("Event", "ErrorBody")
    assert event["contentSchema"]["anyOf"] == [{"$ref": f"#/components/schemas/{name}"} for name in names]
    assert responses["202"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Result"}
    assert [each["name"] for each in operation["parameters"]] == ["Idempotency-Key", "traceparent", "Prefer"]
    assert schemas["Body"]["properties"]["n"] == {"enum": [None, 1]}
    assert schemas["Body"]["additionalProperties"] == {"enum": [None, [], {}]}
    assert "`queue_full`" in responses["503"]["description"]
    assert ("Server-Timing" in responses["200"]["headers"], "Server-Timing" in document.required(responses["200"])) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("code", "always"),
    [
        (ErrorCode.INVALID_API_KEY, {"WWW-Authenticate", "x-should-retry"}),
        (ErrorCode.METHOD_NOT_ALLOWED, {"Allow", "x-should-retry"}),
        (ErrorCode.RATE_LIMIT_EXCEEDED, {"Retry-After", "retry-after-ms"}),
        (ErrorCode.QUOTA_EXCEEDED, {"x-should-retry"}),
        (ErrorCode.QUEUE_TIMEOUT, {"x-should-retry"}),
        (ErrorCode.INTERNAL_ERROR, set()),
    ],
)
def test_errors_have_the_headers_of_their_code(code: ErrorCode, always: set[str]) -> None:
    """Beside the request id. A header without a declaration is an error."""
    endpoint = ApiEndpoint(path="/d", methods=("GET",), tag="t", summary="s", responses={}, errors=frozenset({code}))
    document, _, responses = described(endpoint)
    (response,) = responses.values()

    assert document.required(response) == {"x-request-id", *always}
    undeclared = ResponseDescription(description="Yes.", content={JSON: Result}, headers=("x-new",))
    with pytest.raises(KeyError, match="x-new"):
        openapi([replace(endpoint, responses={200: undeclared})], "1")
