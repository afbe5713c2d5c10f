"""Chats that are passed on whole: capabilities, lines, and the joined response of a stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoint_stand_in import rich_chat, rich_events
from gateway.api.chat import encode_chat, read_chat
from gateway.api.format import missing_capability
from gateway.http.body.strict_json import check_duplicates
from gateway.inference.idempotency import idempotency
from scheduler.capabilities import ENDPOINT, PASSED_ON, Capability, capabilities
from scheduler.chat_document import lines_of, output_line, read_head, read_members
from scheduler.chat_events import as_deltas, joined
from scheduler.errors import RequestError

TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + 4000 * "A"}}
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "tools": st.lists(st.just(TOOL), min_size=1, max_size=3),
        "logprobs": st.just(True),
        "reasoning_effort": st.sampled_from(["low", "high"]),
        "response_format": st.just({"type": "json_object"}),
        "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), max_size=2),
    },
)


def without_identity(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name not in ("id", "object", "created", "model")}


@given(BODIES)
def test_the_joined_events_are_the_whole_response(body: dict[str, Any]) -> None:
    """Whatever a stream is cut into, its sum is what the server would have returned without a stream, and the reverse."""
    whole = rich_chat(body)
    usage = {"choices": [], "usage": whole["usage"]}
    streamed = "".join(output_line(json.dumps(event).encode()) for event in (*rich_events(body), usage))
    line = output_line(json.dumps(whole).encode())

    assert joined(streamed) == without_identity(whole) == joined(line)
    deltas = json.dumps({name: json.loads(bytes(value)) for name, value in as_deltas(line).items()}) + "\n"
    assert not read_head(deltas).whole
    assert joined(deltas) == without_identity(whole)


@pytest.mark.parametrize(
    "junk",
    [
        "[1]",
        "nonsense",
        "[" * 100_000,
        '{"choices": 1}',
        '{"choices": null}',
        '{"choices": [1]}',
        '{"choices": [{"message": "text"}]}',
        '{"choices": [{"delta": {"tool_calls": 1}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": [0]}]}}]}',
        '{"choices": [{"message": {"tool_calls": [{"function": "f"}]}}]}',
    ],
)
def test_junk_is_rejected(junk: str) -> None:
    """A server's output that is no chat response is an error, not a fault."""
    with pytest.raises(ValueError, match="not a"):
        read_head(junk)
    with pytest.raises(ValueError, match="not a"):
        read_members("[]")


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
CALLED = [
    *CHAT["messages"],
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]},
    {"role": "tool", "tool_call_id": "c", "content": "21"},
]


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {}),
        ({"n": 1, "tools": [], "response_format": {"type": "text"}, "logprobs": False, "seed": 1, "stop": "x"}, {}),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, {"tools": "tools"}),
        ({"messages": CALLED}, {"tools": "messages"}),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, {"images": "messages"}),
        ({"response_format": {"type": "json_object"}}, {"structured_output": "response_format"}),
        ({"logprobs": True, "n": 2}, {"logprobs": "logprobs", "choices": "n"}),
        (
            {"reasoning_effort": "low", "logit_bias": {"1": 2}},
            {"reasoning": "reasoning_effort", "logit_bias": "logit_bias"},
        ),
        ({"presence_penalty": 0.5, "beams": 4}, {"penalties": "presence_penalty", "extensions": "beams"}),
        ({"modalities": ["text", "audio"], "audio": {"voice": "x"}}, {"audio": "modalities"}),
    ],
)
def test_needs(changes: dict[str, Any], needs: dict[str, str]) -> None:
    """Each field beyond text needs a capability; a value without an effect needs none."""
    document = read_chat(json.dumps(CHAT | changes).encode(), 100_000).document
    assert document is not None
    assert document.needs == needs
    assert json.loads(document.input) == {k: v for k, v in (CHAT | changes).items() if k != "model" and v != []}


def test_the_estimate_of_an_image_does_not_depend_on_its_size() -> None:
    """The base64 of an image is no text; until the endpoint reports its usage it counts as 1,000 tokens."""
    with_image = CHAT | {"messages": [{"role": "user", "content": [IMAGE]}]}
    document = read_chat(json.dumps(with_image).encode(), 100_000).document
    assert document is not None
    assert 1000 <= len(document.input) // 4 + document.tokens < 1050


LARGE = "data:image/png;base64," + 70_000 * "A"


def taken(raw: bytes) -> tuple[str, int, int] | str:
    """The document, its media and its tokens; or the error."""
    try:
        document = read_chat(raw, 1_000_000).document
    except RequestError as error:
        return f"{error.param}: {error}"
    assert document is not None
    return document.text, document.media_bytes, document.tokens


def body_with(large: str, beside: str = "", role: str = "user") -> bytes:
    part = '{"type": "image_url", "image_url": {"url" : "@" } }'.replace("@", large)
    return f'{{"model": "m", "messages": [{{"role": "{role}", "content": [{part}, {part}]}}]{beside}}}'.encode()


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (body_with(LARGE), 5),
        (body_with(LARGE, role="developer"), 5),
        (body_with(LARGE, ', "tools": [{"a": "é"}], "beams": [":", "x"]'), 5),
        (body_with(LARGE, f', "beams": "{LARGE}"'), 1),
        (body_with(LARGE, f', "beams": {{"{LARGE}": 1, "{LARGE}x": 1}}'), 5),
        (body_with(LARGE, f', "beams": {{"{LARGE}": 1, "{LARGE}": 1}}'), 0),
        (body_with(LARGE, ', "model": "m"'), 0),
        (body_with(LARGE, ', "beams": [":", ' + "1," * 70_000 + '1, "x"]'), 5),
        (body_with(LARGE, ', "beams": [":", ' + " " * 70_000 + ', "x"]'), 0),
        (body_with(LARGE, ', "beams": [":"' + LARGE + '"x"]'), 0),
        (body_with(LARGE + "\\n"), 1),
        (body_with(LARGE + "\\"), 0),
        (body_with(LARGE + "\n"), 0),
        (body_with(LARGE).replace(b"AAA", b"A\xffA", 1), 0),
        (body_with(LARGE, ', "beams": "@"').replace(b"@", b"\xff"), 0),
        (body_with(LARGE)[:-1], 0),
        (body_with(LARGE)[:-120_000], 0),
    ],
)
def test_a_body_without_its_images_is_read_as_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, raw: bytes, parts: int
) -> None:
    """Document and error are the same, whatever is beside the images; `parts`: those of the document, 0 for an error."""
    found = taken(raw)
    if parts:
        document = read_chat(raw, 1_000_000).document
        assert document is not None
        assert len(document.parts or [document.input]) == parts
    monkeypatch.setattr("gateway.api.chat.without_large_strings", lambda raw: (raw, {}))
    assert found == taken(raw)
    assert isinstance(found, str) == (parts == 0)


def test_fields_that_the_worker_sets() -> None:
    """The name of a role is the one that servers know, and a priority travels beside the document."""
    body = CHAT | {"messages": [{"role": "developer", "content": "be brief"}], "priority": 7}
    request = read_chat(json.dumps(body).encode(), 100_000)
    assert request.document is not None
    assert json.loads(request.document.input)["messages"] == [{"role": "system", "content": "be brief"}]
    assert "priority" not in request.document.input
    assert request.payload("m", passed_on=True).parameters["priority"] == 7


@pytest.mark.parametrize(
    ("row", "passes_on", "has"),
    [
        (None, False, frozenset()),
        (None, True, PASSED_ON | {ENDPOINT}),
        (frozenset({"text"}), True, frozenset({"text", ENDPOINT})),
        (frozenset({"tools"}), False, frozenset()),
    ],
)
def test_capabilities(row: frozenset[str] | None, passes_on: bool, has: frozenset[str]) -> None:
    """A model without a server has none; with one, those of its row, or by default all but unknown fields."""
    assert capabilities(row, passes_on=passes_on) == has


@pytest.mark.parametrize(
    ("changes", "has", "error"),
    [
        ({"tools": [TOOL]}, frozenset({"tools"}), None),
        ({"tools": [TOOL]}, frozenset(), "`tools` needs the capability `tools`, which the model `m` does not have."),
        (
            {"input": "a"},
            PASSED_ON,
            "The field `input` is not known here: it belongs to /v1/inference and /v1/embeddings.",
        ),
        ({"kv_options": 4}, frozenset({Capability.EXTENSIONS}), None),
    ],
)
def test_missing_capability(changes: dict[str, Any], has: frozenset[str], error: str | None) -> None:
    """A request is rejected by the name of its field and the capability."""
    document = read_chat(json.dumps(CHAT | changes).encode(), 100_000).document
    assert document is not None
    found: RequestError | None = missing_capability(document, "m", has)
    assert (None if found is None else str(found)) == error


def test_lines_of_an_output() -> None:
    """An output may have been cut within a line."""
    assert list(lines_of('{"a":1}\n{"b"')) == ['{"a":1}', '{"b"']


def test_items_with_an_odd_index_are_appended() -> None:
    """A member that is unknown here may have any form."""
    line = '{"choices":[{"delta":{"annotations":[{"index":[1]},{"index":null}]}}]}\n'
    assert len(joined(line * 2)["choices"][0]["message"]["annotations"]) == 4


def test_a_body_that_is_nested_too_deeply() -> None:
    """Neither the search for duplicate keys nor a translation fails by the recursion limit."""
    nested: Any = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested"):
        check_duplicates(b"[" * 2000 + b"]" * 2000)
    with pytest.raises(RequestError, match="nested"):
        encode_chat({"model": nested})


@pytest.mark.parametrize(("tool", "equal"), [(b'"function"', True), (b'"custom"', False)])
def test_the_fingerprint_of_a_chat_depends_on_values_only(tool: bytes, equal: bool) -> None:
    """White space and the order of members do not matter for an Idempotency-Key, as for other bodies."""

    def fingerprint(raw: bytes) -> str:
        request = read_chat(raw, 1000)
        return idempotency("c", "k", request.identified(request.payload("m", passed_on=True))).fingerprint

    first = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{}}]}'
    other = b'{"model":"m","tools":[{"function":{}, "type": %b}],"messages":[{"content":"x","role":"user"}]}' % tool
    assert (fingerprint(first) == fingerprint(other)) is equal


def test_a_long_stream_is_joined_in_linear_time() -> None:
    """The gateway does this in its event loop: a list of log probabilities is not copied for each token."""
    line = '{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]}}]}\n'
    (choice,) = joined(line * 50_000)["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["message"]["content"]) == 50_000
