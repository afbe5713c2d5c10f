"""LangChain's `ChatOpenAI` on `/v1/responses`."""

from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from features import API, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

ACCESS: dict[str, Any] = {"base_url": API, "api_key": KEY, "model": MODEL, "max_retries": 0, "use_responses_api": True}
chat = ChatOpenAI(**ACCESS)
HELLO = HumanMessage("hello")


def text() -> None:
    assert chat.invoke("hello").text == "olleh"


def stream() -> None:
    assert "".join(chunk.text for chunk in chat.stream("hello")) == "olleh"


def tools() -> None:
    called = chat.bind_tools([Weather]).invoke([HELLO])
    (call,) = called.tool_calls
    Weather.model_validate(call["args"])
    assert chat.invoke([HELLO, called, ToolMessage("21 °C", tool_call_id=call["id"])]).text == "C° 12"


def streamed_tools() -> None:
    chunks = list(chat.bind_tools([Weather]).stream([HELLO]))
    joined: Any = sum(chunks[1:], chunks[0])
    assert len(chunks) > 3
    Weather.model_validate(joined.tool_calls[0]["args"])


def structured() -> None:
    assert isinstance(chat.with_structured_output(Answer).invoke("hello"), Answer)


def image() -> None:
    part: dict[str, Any] = {"type": "image", "base64": PNG, "mime_type": "image/png"}
    assert saw_image(chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, part])]).text)


def stored() -> None:
    continuing = ChatOpenAI(use_previous_response_id=True, **ACCESS)
    first = continuing.invoke([HELLO])
    second = continuing.invoke([HELLO, first, HumanMessage("you")])
    assert (first.response_metadata["id"].startswith("resp_"), second.text) == (True, "uoy")


def wrong_key() -> None:
    stranger = ChatOpenAI(**ACCESS | {"api_key": WRONG_KEY})
    raises(openai.AuthenticationError, lambda: stranger.invoke("hello"))


report(
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "streamed tools": streamed_tools,
        "structured output": structured,
        "image": image,
        "stored": stored,
        "wrong key": wrong_key,
    }
)
