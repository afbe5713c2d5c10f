"""instructor on OpenAI's client: models of pydantic out of tools and of JSON schemas."""

from typing import Any

import instructor
import openai

from features import API, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

plain = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
with_tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
with_schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def text() -> None:
    response: Any = with_tools.chat.completions.create(response_model=None, **HELLO)
    assert response.choices[0].message.content == "olleh"


def stream() -> None:
    chunks: Any = with_tools.chat.completions.create(response_model=None, stream=True, **HELLO)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "olleh"


def tools() -> None:
    weather, completion = with_tools.chat.completions.create_with_completion(response_model=Weather, **HELLO)
    assert isinstance(weather, Weather)
    assert completion.id.startswith("req_")


def streamed_tools() -> None:
    parts = list(with_tools.chat.completions.create_partial(response_model=Weather, **HELLO))
    assert len(parts) > 1
    assert (parts[-1].at, bool(parts[-1].q)) == (0, True)


def structured() -> None:
    assert isinstance(with_schema.chat.completions.create(response_model=Answer, **HELLO), Answer)


def image() -> None:
    picture = instructor.Image.from_base64(f"data:image/png;base64,{PNG}")
    messages: Any = [{"role": "user", "content": ["What is this?", picture]}]
    response: Any = with_tools.chat.completions.create(model=MODEL, response_model=None, messages=messages)
    assert saw_image(response.choices[0].message.content)


def extension() -> None:
    """The stand-in's arguments depend on the field."""
    without = with_tools.chat.completions.create(response_model=Weather, **HELLO)
    extended = with_tools.chat.completions.create(response_model=Weather, extra_body={"beams": 4}, **HELLO)
    assert extended.q != without.q


def wrong_key() -> None:
    stranger = instructor.from_openai(plain.with_options(api_key=WRONG_KEY))
    error: Any = raises(
        Exception, lambda: stranger.chat.completions.create(response_model=Weather, max_retries=0, **HELLO)
    )
    assert "401" in str(error)


report(
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "image": image,
        "extension": extension,
        "wrong key": wrong_key,
    }
)
