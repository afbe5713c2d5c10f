#!/usr/bin/env bash
# Anthropic's Python client sleeps as long as Retry-After says, for twelve hours if it says so; its timeout does not end
# the sleep. OpenAI's client raises the error at once if Retry-After is over two minutes.
#
# Version: anthropic 2.14.0 and openai 3.57.0 from PyPI.
#
# Expected: both clients are generated from the same templates, and a call with `timeout=1` ends within seconds. A
# quota of a day that is used up is a 429 whose honest Retry-After is hours. With it, a call of Anthropic's client
# blocks its thread until then (up to 4,294,967 s, 49 days), and then makes the request again. With
# `x-should-retry: false` beside it, both raise at once.
#
# A gateway must send `x-should-retry: false` with every wait that no caller should sleep through, or leave Retry-After
# out.
#
# Output seen:
#   openai, Retry-After: 43200: RateLimitError at once, 1 request
#   anthropic, Retry-After: 43200: still waits after 5 s with timeout=1, 1 request
#   anthropic, Retry-After: 43200, x-should-retry: false: RateLimitError at once, 1 request
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 anthropic==2.14.0

PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from anthropic import Anthropic
from openai import OpenAI

WAIT_S = 5
requests = []


class Server(BaseHTTPRequestHandler):
    """Answers that a quota is used up for twelve hours. Addresses under /final also say not to retry."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        requests.append(self.path)
        body = b'{"error": {"message": "The quota of the day is used up.", "type": "rate_limit_error"}}'
        self.send_response(429)
        self.send_header("Retry-After", "43200")
        if self.path.startswith("/final"):
            self.send_header("x-should-retry", "false")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def outcome(call):
    """The name of the error of a call, None if it has not ended after WAIT_S; and the number of its requests."""
    requests.clear()
    ended = []

    def run():
        try:
            call()
        except Exception as error:
            ended.append(type(error).__name__)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return (ended or [None])[0], len(requests)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
asked = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
calls = {
    "openai, Retry-After: 43200": OpenAI(base_url=url, api_key="none", timeout=1).chat.completions,
    "anthropic, Retry-After: 43200": Anthropic(base_url=url, api_key="none", timeout=1).messages,
    "anthropic, Retry-After: 43200, x-should-retry: false": Anthropic(
        base_url=f"{url}/final", api_key="none", timeout=1
    ).messages,
}
found = []
for name, client in calls.items():
    error, count = outcome(lambda: client.create(**asked))
    found.append((error, count))
    state = f"{error} at once" if error else f"still waits after {WAIT_S} s with timeout=1"
    print(f"{name}: {state}, {count} request")
assert found == [("RateLimitError", 1), (None, 1), ("RateLimitError", 1)], "the behaviour has changed"
PYTHON
