"""Chats that are passed on to a model's server: in the payload, or, if they are large, in a file beside Redis."""

from gateway.api.format import InferenceRequest
from scheduler.body_store import BodyStore
from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import Payload, Task

NO_ROOM = "Too many large requests are in progress; try again soon."


def with_document(
    payload: Payload, body: InferenceRequest, request_id: str, store: BodyStore | None
) -> tuple[Payload, list[bytes | memoryview] | None]:
    """The payload with the chat that is passed on. If it belongs into a file of the store, its name, and the chat beside it."""
    document = body.document
    if document is None or payload.task is not Task.CHAT_DOCUMENT:
        return payload, None
    if store is not None and store.takes(document.size):
        return payload.with_input(request_id), document.parts or [payload.input.encode()]
    return (payload.with_input(document.text) if document.parts else payload), None


def store_chat(request_id: str, parts: list[bytes | memoryview], store: BodyStore) -> None:
    """Write a large chat, and free its memory. Raises RequestError `no_capacity` if there is no room for it."""
    if not store.put(request_id, parts):
        raise RequestError(ErrorCode.NO_CAPACITY, NO_ROOM)
    parts.clear()
