#!/usr/bin/env bash
# llama.cpp's server counts only the first output in the `usage` of a completion with several prompts, or with n > 1.
#
# Version: xllamacpp 2026.10.11549 from PyPI, which contains llama.cpp's own server (build 11549), on the CPU.
#
# Expected: as in OpenAI's API and in other servers, `usage.completion_tokens` is the number of tokens of all choices,
# and `usage.prompt_tokens` that of all prompts.
#
# Seen: here each token is one character, so the texts show what was generated: three prompts with 20 tokens each give
# three texts of 20 characters, and `completion_tokens` is 20. `n` = 3 does the same. A client or gateway that bills or
# limits by `usage` counts a third of the tokens.
#
# Remedy: one request for each prompt and choice, which is counted right.
#
# Output seen:
#   one prompt: choices 1, characters 20, usage 5 + 20
#   three prompts: choices 3, characters 60, usage 5 + 20
#   n = 3: choices 3, characters 60, usage 5 + 20
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
from llama_cpp import running_server

CASES = {
    "one prompt": {"prompt": "Hello"},
    "three prompts": {"prompt": ["Hello", "A longer prompt", "A"]},
    "n = 3": {"prompt": "Hello", "n": 3},
}
found = []
with running_server() as server:
    for name, body in CASES.items():
        document = server.completion({**body, "max_tokens": 20, "temperature": 0})
        choices, usage = document["choices"], document["usage"]
        characters = sum(len(choice["text"]) for choice in choices)
        found.append((len(choices), characters, usage["prompt_tokens"], usage["completion_tokens"]))
        print("{}: choices {}, characters {}, usage {} + {}".format(name, *found[-1]))
assert found == [(1, 20, 5, 20), (3, 60, 5, 20), (3, 60, 5, 20)], "the behaviour has changed"
PYTHON
