#!/usr/bin/env bash
# Start a stack of simulated GPUs, run `tierlane bench` against it with the arguments given, stop the stack.
# STACK_ARGS says what to start; the exit code is the bench's.
set -euo pipefail
tierlane=$1
shift
home=$(mktemp -d)
# shellcheck disable=SC2086  # STACK_ARGS is a list of words on purpose
"$tierlane" up --ephemeral --data-dir "$home" --port "${BENCH_PORT:-18090}" --gateways 1 --schedulers 1 \
    ${STACK_ARGS:---backend simulated:50 --workers 4} >"$home/up.log" 2>&1 &
up=$!
trap 'kill -INT $up 2>/dev/null || true; wait $up || true; rm -rf "$home"' EXIT

for _ in $(seq 600); do
    [ -e "$home/stack.json" ] && break
    kill -0 "$up" 2>/dev/null || { cat "$home/up.log" >&2; exit 1; }
    sleep 0.1
done
"$tierlane" bench --stack "$home/stack.json" "$@"
