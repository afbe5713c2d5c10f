"""The description is a pure function of the doors: what one line about an address becomes."""

from typing import Any

import msgspec
import pytest

from api_description import Described
from gateway.http.response import JSON
from gateway.http.sse import EVENTS
from gateway.openapi.document import openapi
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription, inference_endpoint, only, probe_endpoint
from scheduler.errors import ErrorCode


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What is sent."""

    text: str
    n: int | None = None


class Told(msgspec.Struct):
    """What comes back."""

    text: str


class Event(msgspec.Struct):
    """A piece of it."""

    delta: str


class Pending(msgspec.Struct):
    """A promise."""

    task_id: str


def responses(*endpoints: ApiEndpoint) -> tuple[Described, dict[str, Any]]:
    """The whole, and the responses of the first operation, references followed."""
    described = Described(openapi(endpoints, "1"))
    operation = next(iter(described.document["paths"][endpoints[0].template].values()))
    return described, {status: described.resolved(each) for status, each in operation["responses"].items()}


def test_one_more_form_of_inference_is_a_line() -> None:
    """Streams, promises and headers of its own are said there; the errors are those of every inference."""
    prefer = Parameter("Prefer", "header", "`respond-async` for a job.")
    promise = ResponseDescription(description="Accepted.", content={JSON: Pending})
    door = inference_endpoint(
        "/v1/tell",
        Asked,
        Told,
        "Tell",
        example={"text": "a"},
        rules={"n": only(None, 1)},
        events=Event,
        parameters=(prefer,),
        responses={202: promise},
    )
    described, told = responses(door)
    operation = described.document["paths"]["/v1/tell"]["post"]

    told_event = told["200"]["content"][EVENTS]["schema"]["properties"]["data"]["anyOf"][0]
    assert told["200"]["content"].keys() == {"application/json", EVENTS}
    assert told["200"]["content"]["application/json"] == {"schema": {"$ref": "#/components/schemas/Told"}}
    assert told_event["contentSchema"]["anyOf"] == [
        {"$ref": f"#/components/schemas/{name}"} for name in ("Event", "ErrorBody")
    ]
    assert told["202"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Pending"}
    assert [each["name"] for each in operation["parameters"]] == ["Idempotency-Key", "traceparent", "Prefer"]
    assert described.document["components"]["schemas"]["Asked"]["properties"]["n"] == {"enum": [None, 1]}
    assert described.document["components"]["schemas"]["Asked"]["additionalProperties"] is False
    assert "`queue_full`" in told["503"]["description"]
    assert "Server-Timing" in told["200"]["headers"]
    assert "Server-Timing" not in described.required(told["200"])


def test_a_status_may_be_an_answer_or_an_error() -> None:
    """A probe's own 503 and the edge's: either body, and only what both have is always there."""
    described, told = responses(probe_endpoint("/p", "A probe", {200: ("Yes.", Told), 503: ("No.", Told)}))
    (own, error) = told["503"]["content"]["application/json"]["schema"]["anyOf"]

    assert own == {"$ref": "#/components/schemas/Told"}
    assert {"$ref": "#/components/schemas/ErrorBody"} in error["allOf"]
    assert told["503"]["description"].startswith("No. `no_capacity`")
    assert described.required(told["503"]) == {"x-request-id"}
    assert {"Retry-After", "retry-after-ms"} <= set(told["503"]["headers"])


@pytest.mark.parametrize(
    ("code", "always"),
    [
        (ErrorCode.INVALID_API_KEY, {"WWW-Authenticate"}),
        (ErrorCode.METHOD_NOT_ALLOWED, {"Allow"}),
        (ErrorCode.QUOTA_EXCEEDED, {"Retry-After", "retry-after-ms", "x-should-retry"}),
        (ErrorCode.QUEUE_FULL, {"Retry-After", "retry-after-ms"}),
        (ErrorCode.QUEUE_TIMEOUT, {"x-should-retry"}),
        (ErrorCode.INTERNAL_ERROR, set()),
    ],
)
def test_the_headers_of_an_error_are_those_that_are_written(code: ErrorCode, always: set[str]) -> None:
    """Beside the request's id, by the table of errors."""
    door = ApiEndpoint(path="/d", methods=("GET",), tag="t", summary="s", responses={}, errors=frozenset({code}))
    described, told = responses(door)
    (response,) = told.values()

    assert described.required(response) == {"x-request-id", *always}


def test_head_has_no_body() -> None:
    """The same statuses and headers as GET."""
    described = Described(openapi([probe_endpoint("/p", "A probe", {200: ("Yes.", Told)})], "1"))
    get, head = (described.document["paths"]["/p"][method] for method in ("get", "head"))
    pairs = [
        (described.resolved(get["responses"][s]), described.resolved(head["responses"][s])) for s in get["responses"]
    ]

    assert len(pairs) >= 5
    assert all("content" in one and "content" not in other for one, other in pairs)
    assert all(one["headers"] == other["headers"] for one, other in pairs)


def test_what_is_alike_stands_there_once() -> None:
    """Two doors of one kind share their errors; the answers of each stay with it."""
    endpoints = [
        inference_endpoint(path, Asked, kind, "Ask", example={}) for path, kind in (("/a", Told), ("/b", Pending))
    ]
    paths = openapi(endpoints, "1")["paths"]
    first, second = (paths[path]["post"]["responses"] for path in ("/a", "/b"))

    assert first["429"] == second["429"] == {"$ref": "#/components/responses/inference-429"}
    assert "content" in first["200"]
    assert first["200"] != second["200"]


def test_a_header_that_is_not_declared_is_named() -> None:
    """The table of headers must have it first."""
    says = ResponseDescription(description="Yes.", content={JSON: Told}, headers=("x-new",))
    door = ApiEndpoint(path="/d", methods=("GET",), tag="t", summary="s", responses={200: says}, errors=frozenset())

    with pytest.raises(KeyError, match="x-new"):
        openapi([door], "1")
