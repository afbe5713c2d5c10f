"""LiteLLM's proxy before the stack: chat, Messages and Responses through it, each whole and as a stream."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PORT = os.environ["FREE_PORT"]
MASTER_KEY = "sk-of-the-proxy-that-this-test-starts"
CONFIG = f"""
model_list:
  - model_name: served
    litellm_params:
      model: openai/openai
      api_base: {os.environ["CLIENT_URL"]}/v1
      api_key: {os.environ["CLIENT_KEY"]}
"""
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "messages": {"messages": MESSAGES, "max_tokens": 100},
    "responses": {"input": "hello"},
}
START_S = 90


def post(path: str, body: dict[str, Any]) -> str:
    data = json.dumps({"model": "served", **body}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {MASTER_KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def texts(value: Any) -> Iterator[str]:
    """The texts in an event, whatever its format."""
    if isinstance(value, dict):
        yield from (value[name] for name in ("content", "text", "delta") if isinstance(value.get(name), str))
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def wait(proxy: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while proxy.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit("The proxy did not start.")


def main() -> None:
    Path("config.yaml").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "litellm.proxy.proxy_cli",
        "--config",
        "config.yaml",
        "--port",
        PORT,
        "--host",
        "127.0.0.1",
    ]
    environment = {**os.environ, "LITELLM_MASTER_KEY": MASTER_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        Path("proxy.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as proxy,
    ):
        try:
            wait(proxy)
            for path, body in BODIES.items():
                assert "olleh" in post(path, body), path
                events = [
                    line[6:] for line in post(path, body | {"stream": True}).splitlines() if line.startswith("data: {")
                ]
                streamed = "".join(text for event in events for text in texts(json.loads(event)))
                assert "olleh" in streamed, (path, events)
        finally:
            proxy.terminate()
    print("all three APIs")


main()
