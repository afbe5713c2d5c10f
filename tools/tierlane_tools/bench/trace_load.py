"""The open loop of a trace: chats or completions as streams, whose first token and number of tokens are recorded.

A request is the file's: its time, its lengths, its prefix. Its customer is one key of its tier, for a whole session the same.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException

from tierlane_tools.bench.command import TOOL
from tierlane_tools.bench.http_client import TEXT, BenchResponse, Pending
from tierlane_tools.bench.load import OpenLoad, Phase, Traffic, error_code
from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.bench.plan.arrivals import Due
from tierlane_tools.bench.plan.inputs import Inputs
from tierlane_tools.bench.plan.plan import BenchPlan, BenchUsageError, TargetAddress, TraceApi
from tierlane_tools.bench.plan.prompts import Prompts
from tierlane_tools.bench.verification.answer_ids import request_id_hex
from tierlane_tools.bench.verification.fate import fate_of
from tierlane_tools.bench.verification.output_check import OutputCheck
from tierlane_tools.traces.replay import ReplayedRequest

MODELS_TIMEOUT_S = 10
SPARE_CONNECTIONS = 32
"""Requests of a burst that need not wait for a new connection."""
FAILED_STREAM = 500
"""The status that a failed stream would have had, for what its error says of the audit."""
_ERROR = b'data: {"error":'
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_USAGE_WITHIN = 4096
"""The usage is in the last bytes of a stream."""


class StreamForm:
    """The requests of one key as bytes."""

    def __init__(self, address: TargetAddress, key: str, plan: BenchPlan, prompts: Prompts) -> None:
        """Raises ValueError for a key that cannot stand in a header."""
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("An API key may hold printable ASCII characters only.")
        chat = plan.trace_api is TraceApi.CHAT
        more = ',"ignore_eos":true' if plan.ignore_eos else ""
        start = f'{{"model":{json.dumps(plan.model)},"stream":true,"stream_options":{{"include_usage":true}}{more},"max_tokens":'
        self._prompts = prompts
        self._start = start.encode()
        self._before = b',"messages":[{"role":"user","content":"' if chat else b',"prompt":"'
        self._after = b'"}]}' if chat else b'"}'
        self._head = (
            f"POST {address.path} HTTP/1.1\r\nHost: {address.authority}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode("ascii")

    def encode(self, request: ReplayedRequest, nonce: bytes) -> bytes:
        """The whole request, head and body."""
        parts = (self._start, b"%d" % request.output_tokens, self._before, self._prompts.text(request, nonce))
        body = b"".join(parts) + self._after
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)


class TraceLoad(OpenLoad):
    """Replays requests, those of a plan with a trace."""

    def __init__(
        self,
        plan: BenchPlan,
        address: TargetAddress,
        keys: Sequence[Sequence[str]],
        *,
        phases: Sequence[Phase],
        inputs: Inputs,
        check: OutputCheck,
    ) -> None:
        """`keys`: by tier, one a customer. Raises ValueError for one that cannot stand in a header."""
        until_s = phases[-1].until_s
        due = (Due(each.at_s, each.tier, each) for each in plan.requests if each.at_s < until_s)
        super().__init__(due, phases, [], inputs, check)
        prompts = Prompts(plan.seed, plan.token_bytes)
        self._keyed = [[StreamForm(address, key, plan, prompts) for key in of_tier] for of_tier in keys]
        self.sent_lag = Histogram()
        """How much later than due a request was sent, with its wait for a connection."""

    def _encode(self, pending: Pending) -> bytes:
        replayed = pending.replayed
        assert replayed is not None
        forms = self._keyed[replayed.tier]
        request = forms[int(replayed.share * len(forms))].encode(replayed, pending.nonce)
        self.sent_lag.record(max(0.0, self.elapsed_s() - pending.due_s))
        return request

    def _file(self, pending: Pending, response: BenchResponse, latency_s: float) -> None:
        body, counters = response.body, pending.counters
        at = body.rfind(_ERROR) if response.status == 200 else -1
        if at >= 0:
            code = error_code(body[at + len(b"data: ") :].split(b"\n", 1)[0])
            counters.failed(response.status, code, latency_s)
            self.ids.add(fate_of(FAILED_STREAM, code), request_id_hex(response))
            return
        super()._file(pending, response, latency_s)
        if response.status == 200 and pending.replayed is not None:
            counters.wanted_tokens += pending.replayed.output_tokens
            used = _USAGE.findall(body, max(0, len(body) - _USAGE_WITHIN))
            counters.tokens += int(used[-1]) if used else len(TEXT.findall(body))
            if pending.first_at:
                counters.first_token.record(pending.first_at - self.started - pending.due_s)


def replay_load(traffic: Traffic, address: TargetAddress, phases: Sequence[Phase]) -> TraceLoad:
    """The load of a plan with a trace. Raises BenchUsageError for a key or a model that cannot be used."""
    plan = traffic.plan
    if plan.model is None:
        plan = replace(plan, model=_first_model(address, plan.trace_api, traffic.keys[0][0]))
    try:
        load = TraceLoad(plan, address, traffic.keys, phases=phases, inputs=traffic.inputs, check=traffic.check)
    except ValueError as error:
        raise BenchUsageError(f"A key cannot be used: {error}") from None
    load.connect(
        address.host, address.port, connections=plan.connections, timeout_s=plan.timeout, spare=SPARE_CONNECTIONS
    )
    return load


def _first_model(address: TargetAddress, api: TraceApi, key: str) -> str:
    """The first model of the server."""
    connection = HTTPConnection(address.host, address.port, timeout=MODELS_TIMEOUT_S)
    try:
        connection.request(
            "GET", address.path.removesuffix(api.path) + "/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        where = TOOL.both_names("model")
        raise BenchUsageError(f"{where}: is missing, and {address.authority} lists no model ({error}).") from None
    finally:
        connection.close()
