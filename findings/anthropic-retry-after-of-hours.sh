#!/usr/bin/env bash
# Anthropic's Python client sleeps as long as Retry-After says, for twelve hours if it says so; its timeout does not end
# the sleep. OpenAI's client raises the error at once if Retry-After is over two minutes.
#
# Version: anthropic 2.14.0 and openai 3.57.0 from PyPI.
#
# Expected: both clients are generated from the same templates, so they treat Retry-After alike, and a call with
# `timeout=1` ends within seconds.
#
# Seen: a quota of a day that is used up is a 429 whose honest Retry-After is hours. With it, a call of Anthropic's client
# blocks its thread until then (up to 4,294,967 s, 49 days), and then makes the request again. With
# `x-should-retry: false` beside it, it raises at once.
#
# Remedy: a server or gateway sends `x-should-retry: false` with every wait that no caller should sleep through, or
# leaves Retry-After out. A caller sets `max_retries=0`.
#
# Output seen:
#   openai, Retry-After: 120: sleeps 120 s, still waits after 3 s with timeout=1, 1 request
#   openai, Retry-After: 43200: RateLimitError at once, 1 request
#   anthropic, Retry-After: 43200: sleeps 43200 s, still waits after 3 s with timeout=1, 1 request
#   anthropic, Retry-After: 43200, x-should-retry: false: RateLimitError at once, 1 request
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 anthropic==2.14.0

PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from anthropic import Anthropic
from openai import OpenAI

WAIT_S = 3
requests, sleeps = [], []


class Server(BaseHTTPRequestHandler):
    """Answers that a quota is used up, for the seconds in the path. Addresses under /final also say not to retry."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        requests.append(self.path)
        body = b'{"error": {"message": "The quota of the day is used up.", "type": "rate_limit_error"}}'
        self.send_response(429)
        self.send_header("Retry-After", self.path.split("/")[1])
        if "/final/" in self.path:
            self.send_header("x-should-retry", "false")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def recorded_sleep(seconds, sleep=time.sleep):
    sleeps.append(seconds)
    sleep(seconds)


def outcome(call):
    """The name of the error of a call, None if it has not ended after WAIT_S; its sleeps in seconds; its requests."""
    requests.clear()
    sleeps.clear()
    ended = []

    def run():
        try:
            call()
        except Exception as error:
            ended.append(type(error).__name__)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return (ended or [None])[0], list(sleeps), len(requests)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
time.sleep = recorded_sleep
url = f"http://127.0.0.1:{server.server_port}"
body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
access = {"api_key": "none", "timeout": 1}
calls = {
    "openai, Retry-After: 120": OpenAI(base_url=f"{url}/120", **access).chat.completions,
    "openai, Retry-After: 43200": OpenAI(base_url=f"{url}/43200", **access).chat.completions,
    "anthropic, Retry-After: 43200": Anthropic(base_url=f"{url}/43200", **access).messages,
    "anthropic, Retry-After: 43200, x-should-retry: false": Anthropic(base_url=f"{url}/43200/final", **access).messages,
}
found = []
for name, client in calls.items():
    error, slept, count = outcome(lambda: client.create(**body))
    found.append((error, slept, count))
    waits = "".join(f"sleeps {seconds:.0f} s, " for seconds in slept)
    state = f"{error} at once" if error else f"still waits after {WAIT_S} s with timeout=1"
    print(f"{name}: {waits}{state}, {count} request")
raised = ("RateLimitError", [], 1)
assert found == [(None, [120], 1), raised, (None, [43200], 1), raised], "the behaviour has changed"
PYTHON
