#!/usr/bin/env bash
# LiteLLM's proxy reports an answer that was cut off as complete; of two choices, it passes on only the reason of the one
# that ends first, as that of choice 0.
#
# Version: litellm 1.108.7 from PyPI with the extra `proxy`, an engine of the kind `hosted_vllm`.
#
# Expected: a proxy passes on `finish_reason` of each choice. Where the engine's stream ends without one and without
# `[DONE]`, as when its process ends and a load balancer between them closes the chunked response properly, the client
# sees no reason either, or an error: the text is not complete.
#
# Seen: for the cut-off stream the proxy adds `"finish_reason": "stop"`, a usage that it has counted itself, and `[DONE]`.
# Nothing tells such an answer from a whole one; a client that repeats answers without a reason never does. With `n: 2`,
# the first reason gets the index 0, whatever its choice, and later ones are dropped, while the text of both goes on: choice
# 0 has the reason of choice 1, and choice 1 none.
#
# Remedy: what is behind the proxy breaks the connection off, without the last chunk, or sends an event with an error:
# the proxy passes on both as an error. One request for each choice.
#
# Output seen:
#   whole answer: engine ['0 length'], client ['0 length'], tokens 2, [DONE] True
#   cut off after two tokens: engine [], client ['0 stop'], tokens 2, [DONE] True
#   broken off after two tokens: engine [], client ['error'], tokens None, [DONE] False
#   two choices: engine ['1 length', '0 stop'], client ['0 length'], tokens 3, [DONE] True
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
    "broken off after two tokens": [event("A"), event(" B")],
    "two choices": [event("A"), event(" C", None, 1), event("", "length", 1), event(" B"), event("", "stop"), "[DONE]"],
}
KEY = "sk-key"


class Engine(BaseHTTPRequestHandler):
    """Sends the stream that the message names, in chunked encoding, with its last chunk unless it is broken off."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        name = body["messages"][0]["content"]
        for each in STREAMS[name]:
            text = f"data: {each}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        if name.startswith("broken off"):
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


def reasons(events):
    """The indices and reasons of choices, and "error" for an error; the tokens of the output, None without usage."""
    documents = [json.loads(each) for each in events if each != "[DONE]"]
    choices = [choice for each in documents for choice in each.get("choices", [])]
    found = [f"{choice['index']} {choice['finish_reason']}" for choice in choices if choice.get("finish_reason")]
    usages = [each["usage"]["completion_tokens"] for each in documents if each.get("usage")]
    return found + ["error" for each in documents if "error" in each], (usages or [None])[-1]


def stream(name):
    """The events that a client gets."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    message = {"role": "user", "content": name}
    body = {"model": "m", "messages": [message], "n": 2 if name == "two choices" else 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
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
seen = []
for name, events in found.items():
    seen.append((*reasons(events), events[-1] == "[DONE]"))
    print("{}: engine {}, client {}, tokens {}, [DONE] {}".format(name, reasons(STREAMS[name])[0], *seen[-1]))
assert seen == [
    (["0 length"], 2, True),
    (["0 stop"], 2, True),
    (["error"], None, False),
    (["0 length"], 3, True),
], "the behaviour has changed"
PYTHON
