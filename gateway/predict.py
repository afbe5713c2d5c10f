"""Two older ways to ask: `POST /v1/predict` and `POST /api/inference`. Their own names for the same things."""

import msgspec

from gateway.api.format import Asked, Served
from gateway.api.inference import Text, check_model
from gateway.dialect import Dialect
from gateway.http.request import check_duplicates, check_text, decode
from gateway.http.response import Answer, encode_json
from gateway.success import completed


class PredictBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/predict`."""

    model_id: str
    input_data: Text


class PlainBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /api/inference`: always the default model."""

    input: Text


class Prediction(msgspec.Struct, gc=False):
    """The answer of `POST /v1/predict`; milliseconds."""

    request_id: str
    output: str
    latency_ms: float


class PlainAnswer(msgspec.Struct, gc=False):
    """The answer of `POST /api/inference`; milliseconds."""

    output: str
    request_id: str
    latency_ms: float


_predict = msgspec.json.Decoder(PredictBody)
_plain = msgspec.json.Decoder(PlainBody)


def _read_predict(raw: bytes, max_input_bytes: int) -> Asked:
    body = decode(_predict, raw)
    check_text("input_data", body.input_data, max_input_bytes)
    check_model("model_id", body.model_id)
    check_duplicates(raw)
    return Asked(body.input_data, body.model_id)


def _write_prediction(served: Served) -> Answer:
    reply = served.replies[0]
    body = encode_json(Prediction(reply.id, reply.output, round(served.latency_ms, 2)))
    return completed(reply, body, served.latency_ms, served.lines)


def _read_plain(raw: bytes, max_input_bytes: int) -> Asked:
    body = decode(_plain, raw)
    check_text("input", body.input, max_input_bytes)
    check_duplicates(raw)
    return Asked(body.input)


def _write_plain(served: Served) -> Answer:
    reply = served.replies[0]
    body = encode_json(PlainAnswer(reply.output, reply.id, round(served.latency_ms, 2)))
    return completed(reply, body, served.latency_ms, served.lines)


PREDICT = Dialect(_read_predict, _write_prediction, "input_data", "model_id", endpoint="/v1/predict")
PLAIN = Dialect(_read_plain, _write_plain, endpoint="/api/inference")
