"""litellm's provider `openai`: `responses`."""

import time
from typing import Any

import litellm

from features import API, KEY, MODEL, PNG, WRONG_KEY, Answer, Weather, raises, report, saw_image

TOOLS = [{"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": False}]
ACCESS: dict[str, Any] = {"api_base": API, "api_key": KEY}
STORED: dict[str, Any] = ACCESS | {"custom_llm_provider": "openai"}
litellm.suppress_debug_info = True  # It prints advice to the output of the report.


def respond(given: Any = "hello", **options: Any) -> Any:
    return litellm.responses(input=given, **{"model": f"openai/{MODEL}", "max_retries": 0} | ACCESS | options)


def text() -> None:
    assert respond().output_text == "olleh"


def stream() -> None:
    events = list(respond(stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "olleh"


def tools() -> None:
    first = respond(tools=TOOLS)
    call: Any = first.output[0]
    Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
    assert respond([result], previous_response_id=first.id).output_text == "C° 12"


def streamed_tools() -> None:
    events = list(respond(tools=TOOLS, stream=True))
    assert "response.function_call_arguments.delta" in {event.type for event in events}
    Weather.model_validate_json(events[-1].response.output[0].arguments)


def structured() -> None:
    Answer.model_validate_json(respond(text_format=Answer).output_text)


def image() -> None:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
    content = [{"type": "input_text", "text": "What is this?"}, part]
    assert saw_image(respond([{"role": "user", "content": content}]).output_text)


def stored() -> None:
    first = respond()
    assert respond("you", previous_response_id=first.id).output_text == "uoy"
    assert litellm.get_responses(response_id=first.id, **STORED).output_text == "olleh"
    litellm.delete_responses(response_id=first.id, **STORED)
    raises(Exception, lambda: litellm.get_responses(response_id=first.id, **STORED))


def background() -> None:
    response = respond(background=True)
    until = time.monotonic() + 20
    while response.status in ("queued", "in_progress") and time.monotonic() < until:
        response = litellm.get_responses(response_id=response.id, **STORED)
        time.sleep(0.05)
    assert (response.status, response.output_text) == ("completed", "olleh")


def wrong_key() -> None:
    raises(litellm.AuthenticationError, lambda: respond(api_key=WRONG_KEY))


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
