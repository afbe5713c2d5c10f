"""An OpenAI-compatible test server in its own thread, with injectable faults."""

import asyncio
import hashlib
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "stand-in-1"


@dataclass
class StandIn:
    """Reverses texts and last chat messages, and token ids as text; the embedding of a text is [length, 1].

    `fault(route, body)` names the fault of a call, or "".
    A chat whose last message of the user contains `SAY<<text>>` gets that text, with `CALL<<name {arguments}>>` that call of a
    tool. The result of a tool gets a text, also if tools are offered.
    A text that contains "unfit" gets 400, "crash" gets 500. A chat with more than text and sampling parameters is answered
    by `rich_chat`.
    """

    fault: Callable[[str, dict[str, Any]], str] = lambda route, body: ""
    models: list[str] = field(default_factory=lambda: [MODEL])
    usage_option: bool = True
    owner: str = "somebody"
    takes_priority: bool = False
    never_streams: bool = False
    media_type: str = "text/event-stream"
    """Of streams."""
    api_key: str = ""
    absent: frozenset[str] = frozenset()
    retry_after: str = "0.2"
    context: int = 0
    """The context length in the list of models; 0: none."""
    idle_s: int = 0
    """The time that the header Keep-Alive tells; 0: no header."""
    idle_form: str = "timeout={}, max=100"
    connections: list[asyncio.BaseTransport | None] = field(default_factory=list)
    """Those of the POSTs, probes included."""
    loading: bool = False
    """It has no model yet, as llama.cpp says it."""
    stopped: bool = False
    """Requests wait until `go_on` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    slow_s: float = 0.0
    chunk_s: float = 0.0
    """Delay between two chunks of a stream."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    model_list_calls: int = 0
    aborted_streams: int = 0
    max_concurrent: int = 0
    port: int = 0
    scheme: str = "http"
    _concurrent: int = 0
    _closing: set[asyncio.BaseTransport | None] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"

    def asked(self, route: str) -> list[dict[str, Any]]:
        """Bodies of the generating calls to a route (probes have no input and are not kept)."""
        return [body for name, body in self.calls if name == route]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=16 << 20, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        for route in ("completions", "chat/completions", "embeddings"):
            app.router.add_post(f"/v1/{route}", self._post)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.stopped:
            await asyncio.to_thread(self.go_on.wait, 60)
        if self.loading:
            return _error(503, "Loading model")
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        self.model_list_calls += 1
        if "models" in self.absent:
            raise web.HTTPNotFound
        if (fault := self.fault("models", {})) and fault.isdigit():
            return web.Response(status=int(fault))
        if fault == "silence":
            await asyncio.sleep(60)
        if not self._authorized(request):
            return _error(401, "Incorrect API key provided: sk-very-secret")
        context = {"max_model_len": self.context} if self.context else {}
        models = [{"id": name, "object": "model", "owned_by": self.owner, **context} for name in self.models]
        return web.json_response({"object": "list", "data": models})

    def _authorized(self, request: web.Request) -> bool:
        return not self.api_key or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.connections.append(request.transport)
        route, body = request.path.removeprefix("/v1/"), await request.json()
        if route in self.absent:
            raise web.HTTPNotFound
        if not self._authorized(request):
            return _error(401, "Incorrect API key provided: sk-very-secret")
        if not body.keys() & {"prompt", "messages", "input"}:
            return _error(400, "The input is missing.")
        self.calls.append((route, body))
        self.traceparents.append(request.headers.get("traceparent", ""))
        self._concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._concurrent)
        try:
            return await self._answer(request, route, body)
        finally:
            self._concurrent -= 1

    async def _answer(self, request: web.Request, route: str, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.fault(route, body) if request.transport not in self._closing else "reset"
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if fault in ("429", "503"):
            return _error(int(fault), "Overloaded.", {"Retry-After": self.retry_after} if self.retry_after else {})
        status, _, closes = fault.partition(" ")
        if closes:  # All connections, without a notice; uvicorn does that to the one of an exception.
            self._closing.update(self.connections)
            for connection in self._closing:
                if connection is not None:
                    asyncio.get_running_loop().call_later(0.01, connection.close)
        if status.isdigit():
            return _error(int(status), "It went wrong at /srv/secret/path with sk-very-secret.")
        if fault == "stall":
            await asyncio.sleep(60)
        if fault == "reset":
            return _abort(request)
        if error := self._rejection(_texts(route, body), body):
            return error
        if body.get("stream") and not self.never_streams:
            return await self._stream(request, route, body, fault)
        rich = RICH.get(route)
        document = rich(body) if rich and body.keys() & FIELDS else _document(route, body, short=fault == "count")
        return await self._whole(request, document, fault)

    def _rejection(self, texts: list[str], body: dict[str, Any]) -> web.Response | None:
        if body.get("priority") and not self.takes_priority:
            return _error(400, f"Got priority {body['priority']} but Priority scheduling is not enabled.")
        if "stream_options" in body and not self.usage_option:
            return _error(422, "unknown field stream_options")
        if any("crash" in text for text in texts):
            return _error(500, "CUDA out of memory at /srv/secret/path")
        if any("unfit" in text for text in texts):
            return _error(400, "The prompt of sk-very-secret is not allowed.")
        if float(body.get("temperature") or 0) > 2:
            return _error(400, "temperature must be at most 2", param="temperature")
        return None

    async def _whole(self, request: web.Request, document: dict[str, Any], fault: str) -> web.StreamResponse:
        text = "<html>It works!</html>" if fault == "junk" else json.dumps(document)
        if fault != "half":
            told = {"Keep-Alive": self.idle_form.format(self.idle_s)} if self.idle_s else {}
            return web.Response(text=text, content_type="application/json", headers=told)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(text)
        await response.prepare(request)
        await response.write(text[: len(text) // 2].encode())
        _abort(request)
        return response

    async def _stream(self, request: web.Request, route: str, body: dict[str, Any], fault: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": self.media_type})
        await response.prepare(request)
        (text,) = _texts(route, body)
        events = [_event(route, char) for char in text[::-1]]
        if rich := bool(body.keys() & FIELDS):
            events = [f"data: {json.dumps(event)}\n\n".encode() for event in rich_events(body)]
        elif route == "chat/completions":
            await response.write(_event(route, "", role="assistant"))
        try:
            for number, event in enumerate(events):
                await response.write(event)
                if fault == "cut" and number == 1:
                    await asyncio.sleep(0.1)  # Otherwise the reader may see only the end of the connection.
                    return _abort(request)
                if fault == "silent" and number == 1:
                    await asyncio.sleep(60)
                if self.chunk_s or fault == "endless":
                    await asyncio.sleep(self.chunk_s or 0.02)
            if not rich:
                await response.write(_event(route, "", _finish(body)))
            if body.get("stream_options"):
                usage = RICH[route](body)["usage"] if rich else _usage([text])
                document = json.dumps({"choices": [], "usage": usage})
                await response.write(f"data: {document}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.aborted_streams += 1
            raise
        return response


FIELDS = frozenset(
    {"tools", "n", "logprobs", "response_format", "reasoning_effort", "logit_bias", "frequency_penalty", "beams"}
    | {"best_of", "echo", "suffix"}
)


def rich_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A response with everything that the request asks for; its texts depend on all of the body but the stream's fields."""
    return _rich(body, "chat.completion", _rich_choice)


def rich_completion(body: dict[str, Any]) -> dict[str, Any]:
    """The same for a completion of one prompt."""
    return _rich(body, "text_completion", _rich_text)


RICH = {"chat/completions": rich_chat, "completions": rich_completion}
Choice = dict[str, Any]


def _rich(body: dict[str, Any], kind: str, choice: Callable[[dict[str, Any], int, str], Choice]) -> dict[str, Any]:
    asked = {name: value for name, value in body.items() if name not in ("model", "stream", "stream_options")}
    mark = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    choices = [choice(body, index, f"{mark} é {index}") for index in range(body.get("n") or 1)]
    details = {"reasoning_tokens": 3}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "completion_tokens_details": details}
    return {"id": "chatcmpl-x", "object": kind, "created": 1, "model": MODEL} | {
        "choices": choices,
        "usage": usage,
        "system_fingerprint": "fp_stand_in",
    }


def _rich_choice(body: dict[str, Any], index: int, text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": "stop"}
    if body.get("reasoning_effort"):
        message["reasoning_content"] = f"thinking {body['reasoning_effort']} about {text}"
    if calls := _calls(body, text):
        message["content"] = None
        message["tool_calls"] = [
            {"id": f"call_{index}_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
        choice["finish_reason"] = "tool_calls"
    elif body.get("tools") or SAY.search(_asked(body.get("messages", []))):
        message["content"] = _texts("chat/completions", body)[0][::-1]
    elif (body.get("response_format") or {}).get("type") in ("json_object", "json_schema"):
        message["content"] = json.dumps({"answer": text})
    if body.get("logprobs"):
        tokens = [{"token": char, "logprob": -0.5, "bytes": list(char.encode()), "top_logprobs": []} for char in text]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    return choice


def _rich_text(body: dict[str, Any], index: int, text: str) -> Choice:
    prompt = (body["prompt"] if body.get("echo") else "") or ""
    tokens = [*map(str, prompt), *text]  # Its characters, or its ids.
    choice: Choice = {"index": index, "text": "".join(tokens), "logprobs": None, "finish_reason": "stop"}
    if body.get("logprobs") is not None:
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": [None, *(-0.5 for _ in tokens[1:])],
            "top_logprobs": [{token: -0.5} for token in tokens],
            "text_offset": list(range(len(tokens))),
        }
    return choice


def rich_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a rich response as a stream, three characters at a time, with the choices in turn."""
    chat = "prompt" not in body
    document = rich_chat(body) if chat else rich_completion(body)
    head = {name: document[name] for name in ("id", "created", "model", "system_fingerprint")}
    kind = "chat.completion.chunk" if chat else "text_completion"
    queues = [list((_rich_deltas if chat else _rich_pieces)(choice)) for choice in document["choices"]]
    events = []
    while any(queues):
        turn = [queue.pop(0) for queue in queues if queue]
        events += [head | {"object": kind, "choices": [choice]} for choice in turn]
    return events


def _rich_pieces(choice: Choice) -> Iterator[Choice]:
    text, known = choice["text"], choice["logprobs"]
    for at in range(0, len(text), 3):
        logprobs = known and {name: values[at : at + 3] for name, values in known.items()}
        yield choice | {"text": text[at : at + 3], "logprobs": logprobs, "finish_reason": None}
    yield choice | {"text": "", "logprobs": None}


def _rich_deltas(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    index, message = choice["index"], choice["message"]

    def made(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": None} | more

    yield made({"role": "assistant", "content": None if message["content"] is None else ""})
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        yield from (made({name: text[at : at + 3]}) for at in range(0, len(text), 3))
    for at, call in enumerate(message.get("tool_calls", ())):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield made({"tool_calls": [{"index": at, "id": call["id"], "type": "function", "function": function}]})
        arguments = call["function"]["arguments"]
        for start in range(0, len(arguments), 3):
            yield made({"tool_calls": [{"index": at, "function": {"arguments": arguments[start : start + 3]}}]})
    for token in (choice.get("logprobs") or {"content": []})["content"]:
        yield made({}, logprobs={"content": [token], "refusal": None})
    yield made({}, finish_reason=choice["finish_reason"])


SAY, CALL = re.compile(r"SAY<<(.*?)>>", re.DOTALL), re.compile(r"CALL<<(\w+) (.*?)>>", re.DOTALL)


def _calls(body: dict[str, Any], text: str) -> list[tuple[str, str]]:
    """The calls of tools, each with its arguments: those that the user wants, else each tool, but none for a result."""
    messages = body.get("messages") or [{"role": "user", "content": ""}]
    asked = _asked(messages)
    if not body.get("tools") or messages[-1]["role"] == "tool":
        return []
    if wanted := CALL.findall(asked) or SAY.findall(asked):
        return [each for each in wanted if isinstance(each, tuple)]
    names = [tool["function"]["name"] for tool in body["tools"]]
    return [(name, json.dumps({"q": text, "at": at})) for at, name in enumerate(names)]


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _asked(messages: list[dict[str, Any]]) -> str:
    """The last message of the user."""
    return next((_text(each) for each in reversed(messages) if each["role"] == "user"), "")


def _texts(route: str, body: dict[str, Any]) -> list[str]:
    if route == "chat/completions":
        wanted = SAY.search(_asked(body["messages"]))
        return [wanted[1][::-1] if wanted else str(body["messages"][-1]["content"])]
    texts = body["input"] if route == "embeddings" else body["prompt"]
    if isinstance(texts, list) and isinstance(texts[0], int):
        texts = " ".join(map(str, texts))
    return [texts] if isinstance(texts, str) else list(texts)


def _usage(texts: list[str]) -> dict[str, int]:
    """One token for each character, and one more for each text."""
    tokens = sum(len(text) + 1 for text in texts)
    return {"prompt_tokens": tokens, "completion_tokens": tokens, "total_tokens": 2 * tokens}


def _finish(body: dict[str, Any]) -> str:
    return "length" if "max_tokens" in body else "stop"


def _document(route: str, body: dict[str, Any], *, short: bool) -> dict[str, Any]:
    texts = _texts(route, body)
    usage, finish_reason = _usage(texts), _finish(body)
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(texts[: len(texts) - short]):
        if route == "embeddings":
            vector = [float(len(text)), 1.0] + [0.5] * ((body.get("dimensions") or 2) - 2)
            rows.append({"object": "embedding", "index": index, "embedding": vector})
        elif route == "completions":
            rows.append({"index": index, "text": text[::-1], "finish_reason": finish_reason})
        else:
            message = {"role": "assistant", "content": text[::-1]}
            rows.append({"index": index, "message": message, "finish_reason": finish_reason})
    rows.reverse()  # `index` gives the order, not the position.
    return {"model": MODEL, "usage": usage, "data" if route == "embeddings" else "choices": rows}


def _event(route: str, text: str, finish_reason: str | None = None, **delta: str) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    choice |= {"delta": {**delta, "content": text}} if route == "chat/completions" else {"text": text}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def _error(status: int, message: str, headers: dict[str, str] | None = None, param: str | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return web.json_response({"error": error}, status=status, headers=headers)


def _abort(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@contextmanager
def serving(stand_in: StandIn, tls: ssl.SSLContext | None = None) -> Iterator[StandIn]:
    """Serve until the block ends, on `stand_in.port` or a free port."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(stand_in.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", stand_in.port, ssl_context=tls)
        await site.start()
        stand_in.port = runner.addresses[0][1]
        stand_in.scheme = "https" if tls else "http"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, name="stand-in")
    thread.start()
    assert ready.wait(10)
    try:
        yield stand_in
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
