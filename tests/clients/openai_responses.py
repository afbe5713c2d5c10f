"""OpenAI's client on `/v1/responses`."""

import time
from typing import Any

import openai

from features import API, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
TOOLS: list[Any] = [openai.pydantic_function_tool(Weather)]


def text() -> None:
    response = client.responses.create(model=MODEL, input="hello")
    assert (response.status, response.output_text) == ("completed", "olleh")
    assert client.responses.input_tokens.count(model=MODEL, input="hello").input_tokens > 0


def stream() -> None:
    with client.responses.stream(model=MODEL, input="hello") as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "olleh"
        assert events.get_final_response().output_text == "olleh"


def tools() -> None:
    first = client.responses.parse(model=MODEL, input="hello", tools=TOOLS)
    call: Any = first.output[0]
    assert isinstance(call.parsed_arguments, Weather)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
    second = client.responses.create(model=MODEL, previous_response_id=first.id, input=[result])
    assert second.output_text == "C° 12"


def streamed_tools() -> None:
    with client.responses.stream(model=MODEL, input="hello", tools=TOOLS) as events:
        kinds = {event.type for event in events}
        call: Any = events.get_final_response().output[0]
    assert "response.function_call_arguments.delta" in kinds
    assert isinstance(call.parsed_arguments, Weather)


def structured() -> None:
    assert isinstance(client.responses.parse(model=MODEL, input="hello", text_format=Answer).output_parsed, Answer)


def image() -> None:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
    content = [{"type": "input_text", "text": "What is this?"}, part]
    message: Any = {"role": "user", "content": content}
    assert saw_image(client.responses.create(model=MODEL, input=[message]).output_text)


def stored() -> None:
    first = client.responses.create(model=MODEL, input="hello")
    assert client.responses.create(model=MODEL, input="you", previous_response_id=first.id).output_text == "uoy"
    assert client.responses.retrieve(first.id).output_text == "olleh"
    assert client.responses.input_items.list(first.id).data[0].type == "message"
    client.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


def background() -> None:
    response = client.responses.create(model=MODEL, input="hello", background=True)
    until = time.monotonic() + 20
    while response.status in ("queued", "in_progress") and time.monotonic() < until:
        response = client.responses.retrieve(response.id)
        time.sleep(0.05)
    assert (response.status, response.output_text) == ("completed", "olleh")
    with client.responses.create(model=MODEL, input="hello", background=True, stream=True) as lost:
        first: Any = next(iter(lost))
    with client.responses.stream(response_id=first.response.id, starting_after=first.sequence_number) as events:
        assert next(event.type for event in events) == "response.queued"
        assert events.get_final_response().output_text == "olleh"


def wrong_key() -> None:
    stranger = client.with_options(api_key=WRONG_KEY)
    raises(openai.AuthenticationError, lambda: stranger.responses.create(model=MODEL, input="hello"))


report(
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "image": image,
        "stored": stored,
        "background": background,
        "wrong key": wrong_key,
    }
)
