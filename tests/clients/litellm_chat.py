"""litellm's provider `openai`: `completion` and `embedding`."""

from typing import Any

import litellm

from features import API, EMBEDDED, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}]
litellm.suppress_debug_info = True  # It prints advice to the output of the report.


def complete(messages: list[Any] = HELLO, **options: Any) -> Any:
    access = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY, "max_retries": 0}
    return litellm.completion(messages=messages, **access | options)


def text() -> None:
    response = complete()
    assert response.choices[0].message.content == "olleh"
    assert response.usage.total_tokens > 0


def stream() -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in complete(stream=True)) == "olleh"


def tools() -> None:
    message = complete(tools=TOOLS, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    assert complete([*HELLO, message, result]).choices[0].message.content == "C° 12"


def streamed_tools() -> None:
    chunks = list(complete(tools=TOOLS, stream=True))
    joined: Any = litellm.stream_chunk_builder(chunks)
    assert len(chunks) > 3
    Weather.model_validate_json(joined.choices[0].message.tool_calls[0].function.arguments)


def structured() -> None:
    Answer.model_validate_json(complete(response_format=Answer).choices[0].message.content)


def image() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    content = [{"type": "text", "text": "What is this?"}, part]
    assert saw_image(complete([{"role": "user", "content": content}]).choices[0].message.content)


def embedding() -> None:
    response = litellm.embedding(model=f"openai/{MODEL}", input=["hello"], api_base=API, api_key=KEY)
    assert response.data[0]["embedding"] == EMBEDDED


def extension() -> None:
    choice = complete(logprobs=True, n=2, extra_body={"beams": 4}).choices[1]
    assert choice.logprobs.content


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
        "embedding": embedding,
        "extension": extension,
        "wrong key": wrong_key,
    }
)
