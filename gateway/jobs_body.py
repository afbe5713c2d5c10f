"""What a client may send to `POST /v1/inference` with `Prefer: respond-async`: the same, and where its end is to be told."""

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.format import Asked
from gateway.api.inference import InferenceBody, read_inference
from gateway.http.request import check_duplicates, decode


class JobBody(InferenceBody, forbid_unknown_fields=True, frozen=True):
    """The body of a job."""

    callback_url: str | UnsetType | None = UNSET


_decoder = msgspec.json.Decoder(JobBody)


def read_job(raw: bytes, max_input_bytes: int) -> tuple[Asked, str | None]:
    """The request, and its callback's URL as it was sent. Raises RequestError, with `param`."""
    if b"callback_url" not in raw and b"\\u" not in raw:  # No other spelling of the name is possible then.
        return read_inference(raw, max_input_bytes), None
    body = decode(_decoder, raw)
    check_duplicates(raw)
    fields = {name: value for name in InferenceBody.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
    url = None if body.callback_url is UNSET else body.callback_url
    return read_inference(msgspec.json.encode(fields), max_input_bytes), url
