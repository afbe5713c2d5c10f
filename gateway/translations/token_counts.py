"""Counts of tokens without a call of the model: the estimate that admission charges for a prompt."""

from gateway.http.response import HttpResponse
from gateway.inference.handler import AwaitedCall
from gateway.inference.submission import input_tokens


class CountCall(AwaitedCall):
    """A call that ends where others are admitted, free of charge."""

    __slots__ = ()

    def counted(self, tokens: int) -> object:
        """The response body."""
        raise NotImplementedError

    def submit(self, raw: bytes) -> None:
        """Check the body. Raises RequestError."""
        self.body = self.decode(raw)
        self.choose_pool()

    async def wait(self) -> None:
        """Return at once, since nothing was admitted."""

    async def response(self) -> HttpResponse:
        """Count the tokens in the form that the model gets, and record the call. Raises RequestError."""
        payload = self.pipeline.payload(self.body, self.api_format)
        count = input_tokens(payload, len(payload.input.encode()), self.body.document)
        self.pipeline.events.answered(self.api_format.endpoint, self.identity)
        limits, form = self.pipeline.customer_limits.lines(self.identity, None), self.api_format.form
        response = HttpResponse.of(200, self.counted(count))
        response.lines = f"x-request-id: {self.request_id}\r\n{limits}"
        response.lines += form.lines(self.request_id, limits) if form else ""
        return response
