"""The OpenAPI 3.1 document: a pure function of the endpoints (gateway/openapi/endpoints.py).

Schemas come from the types that decode and encode. Statuses, retry headers and messages of errors come from the table of
errors. Responses that several operations share become components.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.http.error_responses import TRY_LATER, ErrorBody
from gateway.http.problem_details import PROBLEM_JSON, Problem
from gateway.http.response import JSON
from gateway.http.response_headers import RESPONSE_HEADERS, Schema
from gateway.http.sse import EVENTS
from gateway.openapi.endpoint_kinds import CUSTOMER_ERRORS, LIMIT_HEADERS, TOKEN_LIMIT_HEADERS
from gateway.openapi.model import ApiEndpoint, ResponseDescription
from gateway.openapi.schemas import with_absent
from scheduler.errors import HTTP, ErrorCode

ABOUT = (
    "Inference for customers of several tiers. Every response has the id of its request in `x-request-id`; every response "
    "to an authenticated customer has the state of its limits. All errors have the same form and a `code`; with `Accept: "
    "application/problem+json` they are problem details (RFC 9457). Bodies are strict: an unknown field, a duplicate key, "
    "NaN, or invalid UTF-8 gets a 400 that names the error. Unknown paths get 404 `not_found`."
)
TAGS = {
    "inference": "The same request in several formats, with the same limits, queues, deadlines and errors.",
    "account": "Information for a customer, free of charge.",
    "operations": "For operators and load balancers.",
    "pages": "Public pages.",
}
SCHEMES: dict[str, Schema] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "The customer's API key, or a JWT if this gateway accepts JWTs.",
    },
    "service": {"type": "http", "scheme": "bearer", "description": "The service token, for `/internal/*`."},
}
OPTIONAL = "-if-known"
"""The suffix of the component of a header that may be absent: a reference cannot express that."""


class ApiInfo(NamedTuple):
    """The head of a document: title, description, tags, and kinds of tokens.

    `strict`: bodies may not even have unknown members that ask for nothing.
    """

    title: str
    about: str
    tags: Mapping[str, str]
    schemes: Mapping[str, Schema]
    strict: bool = False


CUSTOMER_API = ApiInfo("Tierlane", ABOUT, TAGS, SCHEMES)


def openapi(endpoints: Sequence[ApiEndpoint], version: str, info: ApiInfo = CUSTOMER_API) -> dict[str, Any]:
    """The document. Raises KeyError for a header without a description."""
    kinds = list(dict.fromkeys([ErrorBody, Problem, *(kind for endpoint in endpoints for kind in endpoint.types())]))
    types, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    forms = {endpoint.body.__name__ for endpoint in endpoints if endpoint.body is not None and endpoint.media != JSON}
    schemas = {
        name: schema if info.strict or name in forms else with_absent(schema) for name, schema in schemas.items()
    }
    schema_of = dict(zip(kinds, types, strict=True))
    for endpoint in endpoints:
        if endpoint.body is not None:
            schema = schemas[endpoint.body.__name__]
            schema["properties"].update(endpoint.rules)
            schema.update({"allOf": list(endpoint.conditions)} if endpoint.conditions else {})
    codes = "\n".join(f"* `{code}`: {HTTP[code].status}. {HTTP[code].cause} {HTTP[code].action}" for code in ErrorCode)
    schemas["ErrorCode"]["description"] = f"The reason of an error, with its status.\n\n{codes}"
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        operations = {method.lower(): _operation(endpoint, method, schema_of) for method in endpoint.methods}
        paths.setdefault(endpoint.template, {}).update(operations)
    names = {
        reference["$ref"].rpartition("/")[2]
        for operation in _operations(paths)
        for response in operation["responses"].values()
        for reference in response["headers"].values()
    }
    headers: dict[str, Schema] = {}
    for name in sorted(names):
        header = RESPONSE_HEADERS[name.removesuffix(OPTIONAL)]
        headers[name] = {
            "description": header.description,
            "required": not name.endswith(OPTIONAL),
            "schema": header.schema,
            "example": header.example,
        }
    return {
        "openapi": "3.1.1",
        "info": {"title": info.title, "version": version, "description": info.about},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in info.tags.items()],
        "paths": paths,
        "components": {
            "securitySchemes": dict(info.schemes),
            "schemas": schemas,
            "headers": headers,
            "responses": share_responses(paths),
        },
    }


def share_responses(paths: Mapping[str, Schema]) -> dict[str, Schema]:
    """Replace responses that occur more than once by references, and return the components.

    A component is named after the tag of the first operation that has it, and the status.
    """
    uses = Counter(
        json.dumps(response) for operation in _operations(paths) for response in operation["responses"].values()
    )
    names: dict[str, str] = {}
    components: dict[str, Schema] = {}
    for operation in _operations(paths):
        responses = operation["responses"]
        for status, response in responses.items():
            text = json.dumps(response)
            if uses[text] == 1:
                continue
            if text not in names:
                name = f"{operation['tags'][0]}-{status}"
                count = sum(taken.partition(".")[0] == name for taken in components)
                names[text] = f"{name}.{count + 1}" if count else name
                components[names[text]] = response
            responses[status] = {"$ref": f"#/components/responses/{names[text]}"}
    return components


def _operations(paths: Mapping[str, Schema]) -> Iterator[Schema]:
    return (operation for operations in paths.values() for operation in operations.values())


def _operation(endpoint: ApiEndpoint, method: str, schema_of: Mapping[Any, Schema]) -> Schema:
    name = endpoint.template.strip("/").translate(str.maketrans("/.", "__", "{}"))
    statuses = sorted({*endpoint.responses, *(HTTP[code].status for code in endpoint.errors)})
    operation: Schema = {
        "operationId": f"{method.lower()}_{name or 'landing'}",
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "security": [{endpoint.token: []}] if endpoint.token else [],
        "parameters": [parameter.document() for parameter in endpoint.parameters],
        "responses": {str(status): _response(endpoint, status, schema_of, method) for status in statuses},
    }
    if endpoint.description:
        operation["description"] = endpoint.description
    if endpoint.body is not None:
        media: Schema = {"schema": schema_of[endpoint.body]}
        if endpoint.example is not None:
            media["example"] = endpoint.example
        operation["requestBody"] = {"required": endpoint.body_required, "content": {endpoint.media: media}}
    return operation


def _response(endpoint: ApiEndpoint, status: int, schema_of: Mapping[Any, Schema], method: str) -> Schema:
    """The response object of one status: the endpoint's own response, its errors, or either of them."""
    codes = sorted(code for code in endpoint.errors if HTTP[code].status == status)
    parts: list[ResponseDescription] = []
    content: dict[str, list[Schema]] = {}
    if (own := endpoint.responses.get(status)) is not None:
        parts.append(own)
        for media, kind in own.content.items():
            content[media] = [_event(endpoint, schema_of[kind], schema_of) if media == EVENTS else schema_of[kind]]
    if codes:
        parts.append(errors := _errors(endpoint, codes))
        for media, kind in errors.content.items():
            content.setdefault(media, []).append(_error_schema(kind, codes, schema_of))
    names = dict.fromkeys(name for part in parts for name in (*part.headers, *part.optional_headers))
    components = {name: name if all(name in part.headers for part in parts) else name + OPTIONAL for name in names}
    for name, component in list(components.items()):
        suffix = component.removeprefix(name)
        components |= {other: other + suffix for other in endpoint.beside.get(name, ())}
    document: Schema = {
        "description": " ".join(part.description for part in parts),
        "headers": {name: {"$ref": f"#/components/headers/{component}"} for name, component in components.items()},
    }
    if content and method != "HEAD":
        document["content"] = {
            media: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
            for media, schemas in content.items()
        }
    return document


def _event(endpoint: ApiEndpoint, schema: Schema, schema_of: Mapping[Any, Schema]) -> Schema:
    """One event of a stream, as OpenAPI 3.2 describes them."""
    chunk = {
        "type": "string",
        "description": "A chunk, or an error, which ends the stream.",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [schema, schema_of[endpoint.error]]},
    }
    if endpoint.error is not ErrorBody:  # Not OpenAI's format: events have names, and the last one has data.
        properties = {"event": {"type": "string"}, "data": chunk}
        return {"type": "object", "properties": properties, "required": ["event", "data"]}
    data = {"anyOf": [chunk, {"const": "[DONE]", "description": "The end of the stream."}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _errors(endpoint: ApiEndpoint, codes: Sequence[ErrorCode]) -> ResponseDescription:
    """The description of errors with one status. Headers are those that gateway/http/error_responses.py writes."""
    status = HTTP[codes[0]].status
    headers: list[str] = ["x-request-id"]
    optional: list[str] = []
    later = [code in TRY_LATER for code in codes]
    # After a long wait, such as for the end of a quota's window, there are none.
    sure = all(later) and ErrorCode.QUOTA_EXCEEDED not in codes
    (headers if sure else optional).extend(["Retry-After", "retry-after-ms"] if any(later) else [])
    advised = [HTTP[code].retry is not None for code in codes]
    (headers if all(advised) else optional).extend(["x-should-retry"] if any(advised) else [])
    headers += {401: ["WWW-Authenticate"], 405: ["Allow"]}.get(status, [])
    optional += ["Accept-Encoding"] if status in (400, 415) else []
    if endpoint.token == "key" and status not in (401, 403, 405):  # noqa: S105  # the kind of token
        # Before the customer is known, there are no limit headers.
        (optional if CUSTOMER_ERRORS.intersection(codes) else headers).extend(LIMIT_HEADERS)
        optional += TOKEN_LIMIT_HEADERS
    if endpoint.token == "key" and endpoint.body is not None and not CUSTOMER_ERRORS.issuperset(codes):  # noqa: S105
        optional.append("Idempotent-Replayed")
    return ResponseDescription(
        description=" ".join(f"`{code}`: {HTTP[code].message}" for code in codes),
        content={JSON: endpoint.error, PROBLEM_JSON: Problem},
        headers=tuple(headers),
        optional_headers=tuple(optional),
    )


def _error_schema(kind: Any, codes: Sequence[ErrorCode], schema_of: Mapping[Any, Schema]) -> Schema:
    """The schema of an error body, with the codes that are possible here."""
    if kind not in (ErrorBody, Problem):
        return schema_of[kind]
    schema: Schema = {"type": "object", "properties": {"code": {"enum": [code.value for code in codes]}}}
    if kind is ErrorBody:
        schema = {"type": "object", "properties": {"error": schema}}
    return {"allOf": [schema_of[kind], schema]}
