"""litellm's provider `anthropic`: `completion` on `/v1/messages`."""

from typing import Any

import litellm

from features import KEY, MODEL, PNG, URL, WRONG_KEY, Weather, raises, report, saw_image

litellm.suppress_debug_info = True  # It prints advice to the output of the report.
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}]


def complete(messages: list[Any] = HELLO, **options: Any) -> Any:
    access = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_retries": 0, "max_tokens": 100}
    return litellm.completion(messages=messages, **access | options)


def text() -> None:
    assert complete().choices[0].message.content == "olleh"


def stream() -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in complete(stream=True)) == "olleh"


def tools() -> None:
    message = complete(tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    assert complete([*HELLO, message, result], tools=TOOLS).choices[0].message.content == "C° 12"


def streamed_tools() -> None:
    chunks = list(complete(tools=TOOLS, stream=True))
    joined: Any = litellm.stream_chunk_builder(chunks)
    assert len(chunks) > 3
    Weather.model_validate_json(joined.choices[0].message.tool_calls[0].function.arguments)


def structured() -> None:
    """Of a model that it does not know, litellm requests it as the call of a tool."""
    Weather.model_validate_json(complete(response_format=Weather).choices[0].message.content)


def image() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    content = [{"type": "text", "text": "What is this?"}, part]
    assert saw_image(complete([{"role": "user", "content": content}]).choices[0].message.content)


def wrong_key() -> None:
    raises(litellm.AuthenticationError, lambda: complete(api_key=WRONG_KEY))


report(
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "image": image,
        "wrong key": wrong_key,
    }
)
