#!/usr/bin/env bash
# LiteLLM's proxy reports an answer that was cut off as complete, and loses the reason of the second of two choices.
#
# Version: litellm 1.108.7 from PyPI with the extra `proxy`, an engine of the kind `hosted_vllm`.
#
# Expected: a proxy passes on `finish_reason` of each choice. Where the engine's stream ends without one and without `[DONE]`, as when
# its process ends and a load balancer between them closes the chunked response properly, the client sees no reason
# either, or an error: the text is not complete.
#
# Seen: for the cut-off stream the proxy adds `"finish_reason": "stop"` and `[DONE]`. Nothing tells such an answer from a whole
# one; a client that repeats answers without a reason never does. With `n: 2`, all events after the reason of one choice that
# have no text are dropped, so the other one never gets its `"length"`.
#
# Remedy: `max_tokens` and usage tell cut-off answers apart where the engine reports usage; one request for each choice.
#
# Output seen:
#   whole answer: engine ['length'], client ['length'], [DONE] True
#   cut off after two tokens: engine [], client ['stop'], [DONE] True
#   two choices: engine ['stop', 'length'], client ['stop'], [DONE] True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'litellm[proxy]==1.108.7'
cd "$folder"

export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_TELEMETRY=False PYTHONDONTWRITEBYTECODE=1
PATH="$folder/venv/bin:$PATH" python - <<'PYTHON'
import http.client
import json
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def event(text, reason=None, choice=0):
    """An event of a chat; without text it has the reason only."""
    delta = {"content": text} if text else {}
    choices = [{"index": choice, "delta": delta, "finish_reason": reason}]
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices})


STREAMS = {
    "whole answer": [event("A"), event(" B"), event("", "length"), "[DONE]"],
    "cut off after two tokens": [event("A"), event(" B")],
    "two choices": [event("A"), event("C", choice=1), event("", "stop"), event("", "length", 1), "[DONE]"],
}
KEY = "sk-key"


class Engine(BaseHTTPRequestHandler):
    """Sends the stream that the message names, in chunked encoding with its end."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for each in STREAMS[body["messages"][0]["content"]]:
            text = f"data: {each}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


def reasons(events):
    documents = [json.loads(each) for each in events if each != "[DONE]"]
    return [reason for each in documents for choice in each["choices"] if (reason := choice.get("finish_reason"))]


def stream(name):
    """The events that a client gets."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    message = {"role": "user", "content": name}
    body = {"model": "m", "messages": [message], "stream": True, "n": 2 if name == "two choices" else 1}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, text
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
parameters = {"model": "hosted_vllm/m", "api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none"}
models = [{"model_name": "m", "litellm_params": parameters}]
Path("config.yaml").write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    until = time.monotonic() + 180
    while True:
        try:
            stream("whole answer")
            break
        except OSError:
            assert proxy.poll() is None and time.monotonic() < until, "the proxy does not start"
            time.sleep(0.5)
    found = {name: stream(name) for name in STREAMS}
finally:
    proxy.kill()
    proxy.wait()
for name, events in found.items():
    print(f"{name}: engine {reasons(STREAMS[name])}, client {reasons(events)}, [DONE] {events[-1] == '[DONE]'}")
seen = [reasons(events) for events in found.values()]
assert seen == [["length"], ["stop"], ["stop"]], "the behaviour has changed"
assert all(events[-1] == "[DONE]" for events in found.values()), "the behaviour has changed"
PYTHON
