"""tritonclient over gRPC."""

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from features import GRPC, KEY, MODEL, WRONG_KEY, raises, report

client = triton.InferenceServerClient(GRPC)
HEADERS = {"authorization": f"Bearer {KEY}"}


def hello() -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello"], dtype=object))
    return [tensor]


def text() -> None:
    assert client.is_model_ready(MODEL, headers=HEADERS)
    assert list(client.infer(MODEL, hello(), headers=HEADERS).as_numpy("text_output")) == [b"olleh"]


def stream() -> None:
    responses: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)), headers=HEADERS)
    client.async_stream_infer(MODEL, hello(), enable_empty_final_response=True)
    parts, final = [], False
    while not final:
        result, error = responses.get(timeout=20)
        assert error is None, error
        parts += result.as_numpy("text_output").tolist() if result.get_response().outputs else []
        final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    assert b"".join(parts) == b"olleh"
    assert len(parts) > 1


def wrong_key() -> None:
    headers = {"authorization": f"Bearer {WRONG_KEY}"}
    error: Any = raises(InferenceServerException, lambda: client.infer(MODEL, hello(), headers=headers))
    assert "UNAUTHENTICATED" in error.status()


report({"text": text, "stream": stream, "wrong key": wrong_key})
client.close()
