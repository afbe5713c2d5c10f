"""Streamed chats for Locust, with the time to the first token as an entry of its own; its length is that of the answers in tokens.

    CHAT_MODEL=NAME CHAT_TOKENS=64 OPENAI_API_KEY=KEY locust -f tools/bench/programs/locust/locustfile.py --headless \
        --host http://127.0.0.1:8080 --users 16 --spawn-rate 16 --run-time 15s --json-file locust

Locust's own time of a streamed request ends with the head of its response. A stream that does not end, or is shorter than asked
for, is a failure.
"""
# ruff: noqa: INP001 - a script that Locust loads

import json
import os
import time
from typing import Any

from locust import HttpUser, events, task

ENTRY = "first token"
TOKENS = int(os.environ["CHAT_TOKENS"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
BODY = {
    "model": os.environ["CHAT_MODEL"],
    "messages": [{"role": "user", "content": "Once upon a time " * 4}],
    "max_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@events.test_start.add_listener
def begin(environment: Any, **_: object) -> None:
    """Let the time of the entry begin here, not with the end of the first answer."""
    environment.stats.get(ENTRY, "SSE")


class Customer(HttpUser):
    """A client that sends its next chat after the end of the last one."""

    @task
    def chat(self) -> None:
        """Send one chat and read its stream."""
        began, first_ms, tokens, ended = time.perf_counter(), 0.0, 0, False
        options = {"json": BODY, "headers": HEADERS, "stream": True, "catch_response": True}
        with self.client.post("/v1/chat/completions", name="chat", **options) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if not first_ms and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                        first_ms = (time.perf_counter() - began) * 1000
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                ended |= line == b"data: [DONE]"
            if response.status_code != 200 or not ended or tokens != TOKENS:
                response.failure(f"status {response.status_code}, {tokens} tokens, ended: {ended}")
                return
        self.environment.events.request.fire(
            request_type="SSE",
            name=ENTRY,
            response_time=first_ms,
            response_length=tokens,
            exception=None,
            context={},
        )
