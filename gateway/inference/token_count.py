"""The count of the tokens of an input, free of charge: the estimate of admission, without a call of the model."""

from collections.abc import Callable

from gateway.http.response import HttpResponse
from gateway.inference.call import InferenceCall
from gateway.inference.chat_documents import with_document
from gateway.inference.entry import Entry
from gateway.inference.token_estimate import input_tokens


def token_count(entry: Entry, call: InferenceCall, document: Callable[[int], object]) -> HttpResponse:
    """The response to a decoded call; `document`: its body for a number of tokens. Raises RequestError."""
    pipeline = entry.pipeline_of(call)
    payload, _ = with_document(pipeline.payload(call), call.body, call.request_id, None)
    count = input_tokens(payload, len(payload.input.encode()), call.body.document)
    pipeline.events.answered(call.api_format.endpoint, call.identity)
    limits, form = pipeline.customer_limits.lines(call.identity, None), call.api_format.form
    response = HttpResponse.of(200, document(count))
    response.lines = f"x-request-id: {call.request_id}\r\n{limits}"
    response.lines += form.lines(call.request_id, limits) if form else ""
    return response
