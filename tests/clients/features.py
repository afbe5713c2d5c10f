"""The parts that all Python clients of this folder share: the address, the inputs, and the report that the test reads."""

import base64
import json
import os
import traceback
from collections.abc import Callable

from pydantic import BaseModel

URL = os.environ["CLIENT_URL"]
API = f"{URL}/v1"
KEY = os.environ["CLIENT_KEY"]
GRPC = os.environ["CLIENT_GRPC"]
WRONG_KEY = "tl_of_nobody"
MODEL = "openai"
EMBEDDED = [5.0, 1.0]
"""The stand-in's vector of a text with five characters."""

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f0005"
        "0001ffa7f4b2c10000000049454e44ae426082"
    )
).decode()


class Weather(BaseModel):
    """The weather in a city; the stand-in calls each tool with these arguments."""

    q: str
    at: int


class Answer(BaseModel):
    """The structured output of the stand-in."""

    answer: str


def report(features: dict[str, Callable[[], None]]) -> None:
    """Run all features, and print a line of JSON: the error of each feature, or ""."""
    results = {}
    for name, feature in features.items():
        try:
            feature()
            results[name] = ""
        except Exception:  # noqa: BLE001 - every failed cell of the table is reported.
            results[name] = traceback.format_exc()
    print(json.dumps(results))


def raises(error: type[Exception], call: Callable[[], object]) -> Exception:
    """The exception of this type that the call must raise."""
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


def saw_image(text: str | None) -> bool:
    """The stand-in's text is its input, reversed."""
    return PNG[::-1] in (text or "")
