"""The response that the events of a stream of `/v1/responses` add up to."""

import json
from typing import Any


def events_of(stream: str) -> list[Any]:
    """The data of the events; each has the name of its type and the next number."""
    lines = stream.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [e["type"] for e in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def joined(events: list[Any]) -> Any:
    """The response, by the deltas alone. Each item ends as its deltas said."""
    output: list[Any] = []
    for event in events:
        kind, at = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert at == len(output)
            output.append(event["item"])
        elif kind == "response.content_part.added":
            assert event["content_index"] == len(output[at]["content"])
            output[at]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = output[at]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "response.refusal.delta":
            output[at]["content"][event["content_index"]]["refusal"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            output[at]["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            output[at]["name"] = event["name"]  # Some servers send it late.
        elif kind == "response.output_item.done":
            output[at]["status"] = event["item"]["status"]
            assert output[at] == event["item"]
    last = events[-1]
    ends = {name: last["response"][name] for name in ("status", "incomplete_details", "usage")}
    assert last["type"] == f"response.{ends['status']}"
    return events[0]["response"] | {"output": output} | ends
