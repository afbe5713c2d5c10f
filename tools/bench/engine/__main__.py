"""`python tools/bench/engine`: runs the engine until SIGTERM or SIGINT, and prints its URL when it listens."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.metrics import FORMS
from engine.server import About, serve
from engine.steps import Pace


def read_arguments() -> argparse.Namespace:
    """The options."""
    about, pace = About(), Pace()
    parser = argparse.ArgumentParser(prog="engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--model", default=about.model, help="its name")
    parser.add_argument("--owner", default=about.owner, help="`owned_by` of the model")
    parser.add_argument("--metrics", choices=FORMS, default=about.metrics, help="whose names, or none: 404")
    parser.add_argument("--default-tokens", type=int, default=about.default_tokens, help="without max_tokens")
    parser.add_argument("--kv-tokens", type=int, default=about.kv_tokens, help="tokens that the cache holds")
    parser.add_argument("--step-ms", type=float, default=pace.step_ms, help="of an empty step")
    parser.add_argument("--sequence-ms", type=float, default=pace.sequence_ms, help="more for each running sequence")
    parser.add_argument("--slots", type=int, default=pace.slots, help="the most running sequences")
    parser.add_argument("--priority", action="store_true", help="order by priority; without it a priority gets 400")
    parser.add_argument("--until-stdin-ends", action="store_true", help="exit when standard input is closed")
    return parser.parse_args()


async def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or the end of the process that holds the other end of standard input."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.until_stdin_ends:
        os.set_blocking(sys.stdin.fileno(), False)
        loop.add_reader(sys.stdin.fileno(), lambda: os.read(sys.stdin.fileno(), 1 << 12) or stop.set())
    about = About(arguments.model, arguments.owner, arguments.metrics, arguments.default_tokens, arguments.kv_tokens)
    pace = Pace(arguments.step_ms, arguments.sequence_ms, arguments.slots, priority=arguments.priority)
    server, url = await serve(about, pace, arguments.host, arguments.port)
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(run(read_arguments()))
