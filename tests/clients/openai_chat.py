"""OpenAI's client on `/v1/chat/completions` and `/v1/embeddings`."""

import json
from typing import Any

import openai

from features import API, EMBEDDED, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [openai.pydantic_function_tool(Weather)]


def text() -> None:
    response = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert response.choices[0].message.content == "olleh"
    assert response.usage is not None


def stream() -> None:
    with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as chunks:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "olleh"


def tools() -> None:
    called = client.chat.completions.parse(model=MODEL, messages=HELLO, tools=TOOLS, n=2, parallel_tool_calls=False)
    assert [choice.finish_reason for choice in called.choices] == ["tool_calls"] * 2
    message: Any = called.choices[1].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    history: Any = [*HELLO, message, result]
    assert client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content == "C° 12"


def streamed_tools() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as events:
        kinds = {event.type for event in events}
        message: Any = events.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def structured() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def image() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    assert saw_image(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content)


def embedding() -> None:
    assert client.embeddings.create(model=MODEL, input=["hello"]).data[0].embedding == EMBEDDED


def extension() -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, reasoning_effort="low", extra_body={"beams": 4}
    )
    choice: Any = response.choices[0]
    assert len(choice.logprobs.content) == len(choice.message.content)
    assert choice.message.reasoning_content.startswith("thinking low")


def wrong_key() -> None:
    stranger = client.with_options(api_key=WRONG_KEY)
    error: Any = raises(
        openai.AuthenticationError, lambda: stranger.chat.completions.create(model=MODEL, messages=HELLO)
    )
    assert json.dumps(error.body)


report(
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "image": image,
        "embedding": embedding,
        "extension": extension,
        "wrong key": wrong_key,
    }
)
