"""tritonclient over REST, on `/v2`."""

from typing import Any

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from features import KEY, MODEL, URL, WRONG_KEY, raises, report

client = triton.InferenceServerClient(URL.removeprefix("http://"))


def infer(key: str = KEY) -> Any:
    tensor = triton.InferInput("text_input", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello", b"you"], dtype=object))
    return client.infer(MODEL, [tensor], headers={"Authorization": f"Bearer {key}"})


def text() -> None:
    assert client.is_model_ready(MODEL, headers={"Authorization": f"Bearer {KEY}"})
    assert list(infer().as_numpy("text_output")) == [b"olleh", b"uoy"]


def wrong_key() -> None:
    error: Any = raises(InferenceServerException, lambda: infer(WRONG_KEY))
    assert "API key" in error.message()


report({"text": text, "wrong key": wrong_key})
client.close()
