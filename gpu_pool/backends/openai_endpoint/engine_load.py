"""What an inference engine reports about its load: running and waiting requests.

    vLLM, SGLang, LMDeploy, TGI, llama.cpp    GET <root>/metrics, in Prometheus' text format
    TensorRT-LLM                              GET <root>/prometheus/metrics, or JSON from <root>/metrics
    SGLang without --enable-metrics           GET <root>/v1/loads, or <root>/get_load
    llama.cpp without --metrics               GET <root>/slots; its number of slots is in <root>/props

The figures are totals of the engine, over all its clients. Under load they are read several times a second, so only the
needed lines of a text are parsed.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gpu_pool.backends.openai_endpoint.client import CALL_FAILURES, Transport

READ_S = 1.0
"""The limit of one read."""
FAULTS = 3
"""After this many failed reads in a row the source is looked for again."""
FIRST_RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
"""Time between two searches for a source, growing while there is none."""
TGI_READINGS = 4
"""TGI lets waiting requests join every few steps only: its queue is the least of this many readings."""
_UNREADABLE = (*CALL_FAILURES, msgspec.MsgspecError, UnicodeDecodeError)

TGI, LLAMA_CPP, SGLANG, TENSORRT_LLM = "TGI", "llama.cpp", "SGLang", "TensorRT-LLM"

_RANK = re.compile(rb'\b(?:engine|dp_rank)="([^"]*)"')


class EngineLoad(NamedTuple):
    """One reading. `waiting`: None if the engine does not report it; `most`: the engine's own limit of running requests.

    `cache_share`: the used part of the KV cache, 0 to 1. `source`: the engine's name.
    """

    running: int
    waiting: int | None
    most: int | None = None
    cache_share: float | None = None
    source: str = ""


_Source = tuple[str, Callable[[bytes], EngineLoad | None]]
"""The path of a document, and what reads its body."""


class _Names(NamedTuple):
    """The metrics of an engine; of `cache` the first that is present counts, the others are summed."""

    source: str
    running: tuple[bytes, ...]
    waiting: tuple[bytes, ...]
    cache: tuple[bytes, ...] = ()


_ENGINES = (
    _Names(
        "vLLM",
        (b"vllm:num_requests_running",),
        (b"vllm:num_requests_waiting",),
        (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
    ),
    _Names(
        SGLANG,
        (b"sglang:num_running_reqs",),
        (b"sglang:num_queue_reqs", b"sglang:num_grammar_queue_reqs"),
        (b"sglang:token_usage",),
    ),
    _Names(TGI, (b"tgi_batch_current_size",), (b"tgi_queue_size",)),
    _Names(
        LLAMA_CPP,
        (b"llamacpp:requests_processing",),
        (b"llamacpp:requests_deferred",),
        (b"llamacpp:kv_cache_usage_ratio",),
    ),
    _Names(
        "LMDeploy",
        (b"lmdeploy:num_requests_running",),
        (b"lmdeploy:num_requests_waiting", b"lmdeploy:num_api_requests_waiting"),
        (b"lmdeploy:gpu_cache_usage_perc",),
    ),
    _Names(
        TENSORRT_LLM,
        (b"trtllm_num_requests_running",),
        (b"trtllm_num_requests_waiting",),
        (b"trtllm_kv_cache_utilization",),
    ),
)


def prometheus_load(body: bytes) -> EngineLoad | None:
    """The load in a Prometheus text; None if it has none of the known names."""
    for names in _ENGINES:
        running = _values(body, names.running[0])
        if running:
            waiting = sum(sum(_values(body, name)) for name in names.waiting)
            cache = next((max(found) for name in names.cache if (found := _values(body, name))), None)
            return EngineLoad(round(sum(running)), round(waiting), None, cache, names.source)
    return None


def _values(body: bytes, name: bytes) -> list[float]:
    """The values of one metric, one for each data-parallel rank: all tensor-parallel ranks of one report the same."""
    ranks: dict[tuple[bytes, ...], float] = {}
    at = 0 if body.startswith(name) else body.find(b"\n" + name) + 1
    while at or body.startswith(name, at):
        end = body.find(b"\n", at)
        line = body[at + len(name) : end if end >= 0 else len(body)]
        if line[:1] in (b"{", b" "):  # Otherwise a longer name.
            labels, _, rest = line.rpartition(b"}")
            rank = tuple(_RANK.findall(labels))
            try:
                value = float(rest.split()[0])  # Before an optional timestamp.
            except (ValueError, IndexError):
                value = 0.0
            ranks[rank] = max(ranks.get(rank, 0.0), value if 0 <= value < 1e9 else 0.0)  # NaN is 0 too.
        at = body.find(b"\n" + name, at) + 1
        if not at:
            break
    return list(ranks.values())


class _Iteration(msgspec.Struct, rename="camel"):
    """One iteration of TensorRT-LLM."""

    num_active_requests: int
    num_queued_requests: int = 0


class _RankLoad(msgspec.Struct):
    """One data-parallel rank of SGLang."""

    num_running_reqs: int | None = None
    num_reqs: int | None = None
    num_waiting_reqs: int = 0
    token_usage: float | None = None


class _RankLoads(msgspec.Struct):
    loads: list[_RankLoad]


class _LlamaSlot(msgspec.Struct):
    """A slot of llama.cpp."""

    is_processing: bool


class _Properties(msgspec.Struct):
    total_slots: int


_iterations = msgspec.json.Decoder(list[_Iteration])
_ranks = msgspec.json.Decoder(_RankLoads)
_old_ranks = msgspec.json.Decoder(list[_RankLoad])
_slots = msgspec.json.Decoder(list[_LlamaSlot])
_properties = msgspec.json.Decoder(_Properties)


def _metrics_load(body: bytes) -> EngineLoad | None:
    """From a Prometheus text, or the list of iterations of TensorRT-LLM: the last one, 0 without one."""
    if body[:1] != b"[":
        return prometheus_load(body)
    # Each read empties the list: another reader may have taken the last ones.
    last = (_iterations.decode(body) or [_Iteration(0)])[-1]
    return EngineLoad(last.num_active_requests, last.num_queued_requests, None, None, TENSORRT_LLM)


def _slots_load(body: bytes) -> EngineLoad | None:
    slots = _slots.decode(body)
    return EngineLoad(sum(slot.is_processing for slot in slots), None, None, None, LLAMA_CPP) if slots else None


def _rank_load(ranks: Sequence[_RankLoad]) -> EngineLoad | None:
    if not ranks:
        return None
    waiting = sum(rank.num_waiting_reqs for rank in ranks)
    if all(rank.num_running_reqs is not None for rank in ranks):
        running = sum(rank.num_running_reqs or 0 for rank in ranks)
    else:  # The older route counts the waiting ones in.
        running = sum(rank.num_reqs or 0 for rank in ranks) - waiting
    cache = max((rank.token_usage for rank in ranks if rank.token_usage is not None), default=None)
    return EngineLoad(max(0, running), waiting, None, cache, SGLANG)


class LoadReader:
    """Reads the load from the source that the endpoint has, if any. `root`: the endpoint's URL without its version."""

    def __init__(self, transport: Transport, root: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._root = root
        self._clock = clock
        self._source: _Source | None = None
        self._most: int | None = None
        self._faults = 0
        self._retry_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._queues: deque[int] = deque(maxlen=TGI_READINGS)

    async def detect(self) -> bool:
        """Find a source; whether there is one. Never raises."""
        try:
            self._most = _properties.decode(await self._get("/props")).total_slots or None
        except _UNREADABLE:
            self._most = None
        sources: tuple[_Source, ...] = (
            ("/prometheus/metrics", prometheus_load),
            ("/metrics", _metrics_load),
            ("/v1/loads", lambda body: _rank_load(_ranks.decode(body).loads)),
            ("/get_load", lambda body: _rank_load(_old_ranks.decode(body))),
            ("/slots", _slots_load),
        )
        for source in sources:
            if (await self._tried(*source)) is not None:
                self._source, self._faults, self._retry_s = source, 0, FIRST_RETRY_S
                return True
        self._source = None
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)
        return False

    async def read(self) -> EngineLoad | None:
        """The load now; None if it is not known. Never raises."""
        if self._source is None and (self._clock() < self._retry_at or not await self.detect()):
            return None
        load = await self._tried(*self._source) if self._source is not None else None
        self._faults = 0 if load is not None else self._faults + 1
        if self._faults >= FAULTS:
            self._source, self._retry_at = None, self._clock() + self._retry_s
        return load

    async def _tried(self, path: str, read: Callable[[bytes], EngineLoad | None]) -> EngineLoad | None:
        try:
            load = read(await self._get(path))
        except _UNREADABLE:
            return None
        if load is None:
            return None
        if load.source == TGI and load.waiting is not None:
            self._queues.append(load.waiting)
            load = load._replace(waiting=min(self._queues))
        return load._replace(most=self._most)

    async def _get(self, path: str) -> bytes:
        """The document, b"" unless the status is 200."""
        reply = await self._transport.get(self._root + path, READ_S)
        return reply.body if reply.status == 200 else b""
