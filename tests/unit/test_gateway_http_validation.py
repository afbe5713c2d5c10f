"""Messages for bodies that do not fit their type: each names the field, the fault, and what to do."""

import pytest

from gateway.api.chat import read_chat
from gateway.api.inference import PREDICT, read_inference
from gateway.served_models import MAX_LISTED, model_not_found
from gateway.translations.messages import read_messages
from scheduler.errors import RequestError

FIELDS = "The fields are: `input`, `model`, `parameters`, `service_tier`."
CHAT = '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], '


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("[]", None, "The body must be an object, not an array."),
        ("", None, "The body is empty: send a JSON object."),
        (
            "{'input': 'a'}",
            None,
            "The body is not valid JSON: expecting property name enclosed in double quotes (line 1, column 2).",
        ),
        ('{"input": "a"', None, "The body is not valid JSON: expecting ',' delimiter (line 1, column 14)."),
        ("{}", "input", "The field `input` is required."),
        ('{"input": 1}', "input", "`input` must be a string, not an integer."),
        ('{"input": null}', "input", "`input` must be a string, not null."),
        (
            '{"input": "a", "service_tier": 3}',
            "service_tier",
            "`service_tier` must be a string or null, not an integer.",
        ),
        ('{"input": "a", "parameters": "x"}', "parameters", "`parameters` must be an object, not a string."),
        (
            '{"input": "a", "parameters": {"x": {}}}',
            "parameters",
            "A value in `parameters` must be true or false, a number, a string, an array or null, not an object.",
        ),
        (
            '{"input": "a", "parameters": {"x": 99999999999999999999}}',
            "parameters",
            "A value in `parameters` must be at most 9223372036854775807.",
        ),
        ('{"input": "a", "xyz": 1}', "xyz", f"The field `xyz` is not known here: leave it out. {FIELDS}"),
        ('{"inptu": "a"}', "inptu", f"The field `inptu` is not known here: did you mean `input`? {FIELDS}"),
        (
            '{"input": "a", "stream": true}',
            "stream",
            (
                "The field `stream` is not known here: other paths stream, such as /v1/chat/completions: send "
                f'`"stream": true` there. {FIELDS}'
            ),
        ),
        (
            '{"input": "a", "callback_url": "https://example.com"}',
            "callback_url",
            (
                "The field `callback_url` is not known here: it belongs to a job: send it to POST /v1/inference with the "
                f"header `Prefer: respond-async`. {FIELDS}"
            ),
        ),
        (
            '{"input": "a", "Prefer": "respond-async"}',
            "Prefer",
            (
                "The field `Prefer` is not known here: it is a header of the request, not a field of the body: send it to "
                f"POST /v1/inference with the header `Prefer: respond-async`. {FIELDS}"
            ),
        ),
        (
            '{"input": "a", "max_tokens": 5}',
            "max_tokens",
            (
                "The field `max_tokens` is not known here: put it into `parameters`, as in "
                '{"input": "...", "parameters": {"max_tokens": 16}}.'
            ),
        ),
    ],
)
def test_messages_for_the_native_body(body: str, param: str | None, message: str) -> None:
    """JSON's names of types, and the right place of a field that belongs elsewhere."""
    with pytest.raises(RequestError) as error:
        read_inference(body.encode(), 1000)

    assert (error.value.param, error.value.message) == (param, message)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (CHAT + '"n": 1.5}', "n", "`n` must be an integer or null, not a number with a fraction."),
        (CHAT + '"stream": "yes"}', "stream", "`stream` must be true or false or null, not a string."),
        (CHAT + '"logit_bias": {"a": "b"}}', "logit_bias", "A value in `logit_bias` must be a number, not a string."),
        (
            '{"model": "tiny", "messages": [{"role": "robot", "content": "a"}]}',
            "messages",
            "`messages[0].role` must be one of `system`, `developer`, `user`, `assistant`, `tool`.",
        ),
        (
            '{"model": "tiny", "messages": [{"content": "a"}]}',
            "role",
            "The field `role` is required in `messages[0]`.",
        ),
    ],
)
def test_messages_for_nested_fields(body: str, param: str, message: str) -> None:
    """The message has the path; values are not repeated."""
    with pytest.raises(RequestError) as error:
        read_chat(body.encode(), 1000)

    assert (error.value.param, error.value.message) == (param, message)


def test_message_for_an_unknown_nested_field() -> None:
    """It has the name and the place."""
    with pytest.raises(RequestError) as error:
        read_messages(
            b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "any", "x": 1}}',
            1000,
        )

    assert (error.value.param, error.value.message) == (
        "x",
        "The field `x` is not known in `tool_choice`: leave it out.",
    )


def test_a_stream_is_not_possible_at_other_endpoints() -> None:
    """The message is the same at the older forms of the native API."""
    with pytest.raises(RequestError, match=r'send `"stream": true` there. The fields are: `model_id`, `input_data`.'):
        PREDICT.read(b'{"model_id": "tiny", "input_data": "a", "stream": true}', 1000)


@pytest.mark.parametrize(
    ("count", "end"),
    [
        (0, "No model is served now."),
        (2, "Models: `m00`, `m01`."),
        (MAX_LISTED + 3, "`m09` and 3 more (GET /v1/models)."),
    ],
)
def test_an_unknown_model_is_answered_with_the_known_ones(count: int, end: str) -> None:
    """Sorted, and at most ten of them."""
    error = model_not_found("model", [f"m{i:02}" for i in reversed(range(count))])

    assert error.message.startswith("There is no such model. ")
    assert error.message.endswith(end)
