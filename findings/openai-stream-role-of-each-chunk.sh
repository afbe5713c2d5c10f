#!/usr/bin/env bash
# OpenAI's Python client joins the roles of the chunks of a stream: a server that sends `role` with each chunk gives a
# message of the role "assistantassistantassistant".
#
# Version: openai 3.57.0 from PyPI.
#
# Expected: `role` of a delta is one word that says who speaks; servers such as Ollama send it with each chunk. LiteLLM
# 1.110 (`stream_chunk_builder`) has "assistant" for such a stream.
#
# Seen: `chat.completions.create(stream=True)` passes each chunk on as it is. The helper `chat.completions.stream()` adds
# every string of the deltas to the one before, `role` too, so its final message cannot be sent back as the history of
# the next turn.
#
# Remedy: a server sends `role` once, in the first chunk, and a gateway that adds a chunk with the role removes that of
# the engine behind it.
#
# Output seen:
#   role in the first chunk: assistant
#   role in each of three chunks: assistantassistantassistant
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0

PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from openai import OpenAI

WORDS = ("Hel", "lo", " there")


class Server(BaseHTTPRequestHandler):
    """Streams three words; the model's name says which chunks have the role."""

    def do_POST(self):
        model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        deltas = [{"content": word} for word in WORDS]
        for delta in deltas if model == "each" else deltas[:1]:
            delta["role"] = "assistant"
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": model}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for choice in choices:
            self.wfile.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


def role(client, model):
    with client.chat.completions.stream(model=model, messages=[{"role": "user", "content": "Hi"}]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hello there", message
    return message.role


server = HTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
found = [role(client, model) for model in ("first", "each")]
print("role in the first chunk:", found[0])
print("role in each of three chunks:", found[1])
assert found == ["assistant", "assistant" * 3], "the behaviour has changed"
PYTHON
