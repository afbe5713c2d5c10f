"""The CPU of traces in a gateway and a worker: off, at 1 % and at 10 %, in pairs of turns.

The path of a request in the gateway (fast path, admission, reply, response) runs without sockets and Redis. A turn with
traces includes their export to a collector in another process. Each turn is compared with its neighbour, because other work
of the machine affects both: printed are the median difference, and that of the fastest turns of both kinds.
"""
# ruff: noqa: INP001, SLF001 - a folder of scripts, not a package; and an experiment on the inside of the gateway

import argparse
import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from multidict import CIMultiDict, CIMultiDictProxy
from rich.console import Console

from gateway.api.inference import INFERENCE
from gateway.app import Gateway
from gateway.http.response import HttpResponse
from gateway.inference.call import KnownHeaders
from gateway.inference.fast_path import FastPathRequest
from gateway.inference.traces import RequestTraces
from gpu_pool.worker.traces import BatchTraces
from ledger.catalog.api_key import NewKey, mint
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity, Key, Model, Snapshot, Tier
from ratelimit.limits import Level, RemainingLimits
from scheduler.payload import Payload, add_context, encode_payload
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.protocol.replies import Reply
from scheduler.states import Admission
from scheduler.tracing import Context, new_span_id, new_trace_id
from tierlane.roles.gateway import COLLECT_AFTER, gateway_config
from tierlane.roles.tracing import OtlpSpans
from tierlane.settings.model import Settings

BODY = b'{"input": "Once upon a time there was a gateway"}'
BATCH = 32
SHARES = (0.0, 0.01, 0.1)
"""0: tracing is on, but no request is sampled."""
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


show = Console(highlight=False, width=120).print


class OneCustomer(Catalog):
    """A catalog of one tier, one model and one key."""

    def __init__(self, key: NewKey) -> None:
        super().__init__("postgresql://nowhere")
        tier = Tier("paid", 1, 0.1, (1e6, 1e6, 10**6, None), 10**6, 2000, None, None)
        identity = Identity(key.id, "customer-1", "one", "paid", 2000, limits=(1e6, 1e6, 10**6, None))
        model = Model("tiny", "default", 32, None, 40, 1e6, 0.8, 0, enabled=True, cache_scope="customer")
        row = Key(identity, key.secret_hash, float("inf"), False, False)  # noqa: FBT003 - neither revoked nor suspended
        self.snapshot = Snapshot(1, (tier,), {}, {key.id: row}, {"tiny": model}, ())
        self._responded_at = self._confirmed_at = float("inf")


class Client:
    """A connection that discards its responses."""

    remote = "127.0.0.1"
    answered = 0
    known_headers: KnownHeaders | None = None

    def occupy(self, customer_id: str) -> None:
        """Connections are not counted."""

    def write_response(self, answer: HttpResponse) -> None:
        """Encode the response, without a socket."""
        self.answered += len(answer.head("") + answer.body) > 0

    def error_response(self, error: Exception, request_id: str, *, problem: bool) -> HttpResponse:
        """No request may fail."""
        raise RuntimeError(f"{request_id} failed ({problem=})") from error


def one_gateway(key: NewKey) -> Gateway:
    """A gateway that accepts requests without workers."""
    settings = Settings.model_validate({"redis_url": "unix:///nowhere", "service_token": "x" * 16})
    config = replace(gateway_config(settings), data_dir=None, metrics_dir=None, jobs=None)
    gateway = Gateway(config, OneCustomer(key))
    gateway.limits.no_gpu = lambda now: False  # type: ignore[method-assign]  # noqa: ARG005  # its parameter is "now"
    return gateway


def switch(gateway: Gateway, traces: RequestTraces | None) -> None:
    """Switch traces of the gateway on or off: two gateways would differ in their memory layout."""
    object.__setattr__(gateway.inference._parts, "traces", traces)
    gateway.inference.events._log = traces


def serve(gateway: Gateway, headers: CIMultiDictProxy[str], count: int) -> None:
    """Serve a number of requests, as many in a turn of the event loop as a batch has."""
    authorization = headers.getall("Authorization")
    cached = CIMultiDictProxy(CIMultiDict({"Content-Type": headers["Content-Type"]}))
    client, verdict = Client(), Verdict(Admission.ACCEPTED, RemainingLimits([Level(1e6, 0)]), depth=1)
    fast_path = gateway._fast_path
    for first in range(0, count, BATCH):
        for _ in range(first, min(count, first + BATCH)):
            FastPathRequest(fast_path, client, INFERENCE, cached, authorization).start(BODY)  # type: ignore[arg-type]
        fast_path._turn()
        while gateway.admission._pending:
            pending = gateway.admission._pending.popleft()
            gateway.admission._judged(pending, verdict)
            s = pending.submission
            reply = Reply(s.id, s.customer_id, s.nonce, "completed", "", 1, 1.0, "b1", 32, "w1", 50.0, 9, "v", "output")
            gateway.pending_requests.resolve(reply)
        fast_path._turn()
    if client.answered != count:
        raise RuntimeError(f"{client.answered} of {count} were answered")


def run(traces: BatchTraces, batches: Sequence[Sequence[ClaimedRequest]], outcomes: Sequence[Outcome]) -> None:
    """Trace these batches as a worker does."""
    for requests in batches:
        with traces.of("b1", requests, 1.0) as trace:
            trace.begins()
            trace.over()
            trace.ended(outcomes)


def claimed(share: float, count: int) -> list[list[ClaimedRequest]]:
    """Batches with a share of sampled requests."""
    plain, every = encode_payload(Payload("tiny", "hello", {})), round(1 / share) if share else 0

    def body(number: int) -> bytes:
        if not every or number % every:
            return plain
        return add_context(plain, Context(new_trace_id(), new_span_id()))

    numbers = [range(first, first + BATCH) for first in range(0, count, BATCH)]
    return [[ClaimedRequest(f"r{number}", 1000, 1, body(number)) for number in each] for each in numbers]


def sent(spans: OtlpSpans, work: Callable[[], None]) -> None:
    """Do the work, and export its spans."""
    work()
    spans._processor.force_flush()


def microseconds(work: Callable[[], None], count: int) -> float:
    """The CPU of the process with its threads for one of `count` requests."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e6


def paired(off: Callable[[], None], on: Callable[[], None], pairs: int, count: int) -> str:
    """The additional CPU as text; which turn is first alternates."""
    base: list[float] = []
    more: list[float] = []
    for turn in range(pairs):
        first, second = (off, on) if turn % 2 else (on, off)
        one, other = microseconds(first, count), microseconds(second, count)
        without, with_ = (one, other) if turn % 2 else (other, one)
        base.append(without)
        more.append(with_ - without)
    quickest = min(one + other for one, other in zip(base, more, strict=True)) - min(base)
    return (
        f"{median(base):5.2f} us a request, {median(more):+5.2f} by the median pair, {quickest:+5.2f} by the quickest"
    )


def measured_gateway(spans: OtlpSpans, pairs: int, count: int) -> None:
    """Print a line for each share."""
    key = mint()
    head = {"Authorization": f"Bearer {key.text}", "Content-Type": "application/json"}
    headers, gateway = CIMultiDictProxy(CIMultiDict(head)), one_gateway(key)

    def turn(traces: RequestTraces | None) -> None:
        switch(gateway, traces)
        serve(gateway, headers, count)

    turn(None)  # Warm-up.
    for share in SHARES:
        on = partial(sent, spans, partial(turn, RequestTraces(spans, share)))
        show(f"gateway, {share:>3.0%} sampled: {paired(partial(turn, None), on, pairs, count)}")


def measured_worker(spans: OtlpSpans, pairs: int, count: int) -> None:
    """Print a line for each share, for the tracing of a worker alone."""
    outcomes = [Outcome(f"r{number}", "", 1.0, 1, "v", "out") for number in range(BATCH)]
    for share in SHARES:
        batches = claimed(share, count)
        off, on = (partial(run, BatchTraces(each, "w1", "default"), batches, outcomes) for each in (None, spans))
        show(f"worker,  {share:>3.0%} sampled: {paired(off, partial(sent, spans, on), pairs, count)}")


async def measure(port: str, pairs: int, count: int) -> None:
    """Measure in an event loop, which a gateway needs."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)  # As in a gateway.
    spans = OtlpSpans(f"http://127.0.0.1:{port}", "gateway", "g1")
    measured_gateway(spans, pairs, count)
    measured_worker(spans, pairs, count)
    spans.close()


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--requests", type=int, default=10_000, help="in each turn")
    arguments = parser.parse_args()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            port = (collector.stdout or sys.stdin).readline().strip()
            asyncio.run(measure(port, arguments.pairs, arguments.requests))
        finally:
            collector.terminate()


if __name__ == "__main__":
    main()
