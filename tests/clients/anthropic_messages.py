"""Anthropic's client on `/v1/messages`."""

from typing import Any

import anthropic

from features import KEY, MODEL, PNG, URL, WRONG_KEY, Answer, Weather, raises, report, saw_image

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 100}
TOOL: dict[str, Any] = {"name": "Weather", "input_schema": Weather.model_json_schema()}


@anthropic.beta_tool
def weather(q: str, at: int) -> str:
    """The weather in a city."""
    return f"{q}: {at} °C"


def text() -> None:
    message: Any = client.messages.create(messages=HELLO, system="Be brief.", **ASK)
    assert message.content[0].text == "olleh"
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0


def stream() -> None:
    with client.messages.stream(messages=HELLO, **ASK) as events:
        assert "".join(events.text_stream) == "olleh"


def tools() -> None:
    called = client.messages.create(messages=HELLO, tools=[TOOL], **ASK)
    use: Any = called.content[0]
    Weather.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 °C"}
    history: Any = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer: Any = client.messages.create(messages=history, **ASK)
    assert (called.stop_reason, answer.content[0].text) == ("tool_use", "C° 12")
    runner = client.beta.messages.tool_runner(messages=HELLO, tools=[weather], max_iterations=2, **ASK)
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]


def streamed_tools() -> None:
    with client.messages.stream(messages=HELLO, tools=[TOOL], **ASK) as events:
        kinds = {event.type for event in events}
        use: Any = events.get_final_message().content[0]
    assert "input_json" in kinds
    Weather.model_validate(use.input)


def structured() -> None:
    schema = anthropic.transform_schema(Answer)
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message: Any = client.messages.create(messages=HELLO, output_config=config, **ASK)
    Answer.model_validate_json(message.content[0].text)


def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    message: Any = client.messages.create(messages=[{"role": "user", "content": content}], **ASK)
    assert saw_image(message.content[0].text)


def wrong_key() -> None:
    stranger = client.with_options(api_key=WRONG_KEY)
    raises(anthropic.AuthenticationError, lambda: stranger.messages.create(messages=HELLO, **ASK))


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
