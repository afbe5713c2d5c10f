"""LangChain's `ChatOpenAI` and `OpenAIEmbeddings`, on `/v1/chat/completions`."""

from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from features import API, EMBEDDED, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

ACCESS: dict[str, Any] = {"base_url": API, "api_key": KEY, "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**ACCESS)
HELLO = HumanMessage("hello")


def text() -> None:
    message = chat.invoke("hello")
    assert message.text == "olleh"
    assert message.usage_metadata is not None


def stream() -> None:
    assert "".join(chunk.text for chunk in chat.stream("hello")) == "olleh"


def tools() -> None:
    with_tools = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
    called = with_tools.invoke([HELLO])
    (call,) = called.tool_calls
    Weather.model_validate(call["args"])
    answer = chat.invoke([HELLO, called, ToolMessage("21 °C", tool_call_id=call["id"])])
    assert answer.text == "C° 12"


def streamed_tools() -> None:
    chunks = list(chat.bind_tools([Weather]).stream([HELLO]))
    joined: Any = sum(chunks[1:], chunks[0])
    assert len(chunks) > 3
    Weather.model_validate(joined.tool_calls[0]["args"])


def structured() -> None:
    assert isinstance(chat.with_structured_output(Answer).invoke("hello"), Answer)
    called = chat.with_structured_output(Weather, method="function_calling").invoke("hello")
    assert isinstance(called, Weather)


def image() -> None:
    part: dict[str, Any] = {"type": "image", "base64": PNG, "mime_type": "image/png"}
    assert saw_image(chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, part])]).text)


def embedding() -> None:
    assert OpenAIEmbeddings(check_embedding_ctx_length=False, **ACCESS).embed_query("hello") == EMBEDDED


def extension() -> None:
    message = ChatOpenAI(extra_body={"beams": 4}, logprobs=True, **ACCESS).invoke("hello")
    assert message.response_metadata["logprobs"]["content"]


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
        "embedding": embedding,
        "extension": extension,
        "wrong key": wrong_key,
    }
)
