"""What a load sends: prompts and lengths, which depend on a seed alone, so that they are the same for each compared system."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec

MEAN_TOKENS = 80
SIGMA = 1.0
MOST_TOKENS = 2000
SHORT_TOKENS = 30
"""An answer of at most this length is a short one."""
_FILLER = "The quick brown fox jumps over the lazy dog. " * 8
_SAMPLE = 200_000
_encode = msgspec.json.encode


@dataclass(frozen=True)
class Load:
    """The requests of one customer. `clients` of a closed loop, or a `rate` in requests/s of an open one (Poisson).

    `begin_s`, `end_s`: seconds from the start of the warm-up; `end_s` None: until the end of the run. `exact`: a right text is
    that of the stand-in engine; otherwise it has a character for each token. `tokens`: of each answer; 0: of different lengths.
    `leaves_s`: the client leaves so many seconds after it has sent a request; 0: never. `headers`: more lines of the request's
    head, each with its line end.
    """

    name: str = "chats"
    key: str = ""
    clients: int = 0
    rate: float = 0.0
    stream: bool = False
    seed: int = 1
    begin_s: float = 0.0
    end_s: float | None = None
    exact: bool = True
    tokens: int = 0
    leaves_s: float = 0.0
    headers: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """One request. `number` is the same in each run of the same load."""

    load: Load
    number: tuple[int, int]
    prompt: str
    tokens: int


def lengths(seed: str) -> Iterator[int]:
    """Lengths of outputs in tokens: lognormal, clipped."""
    random, mu = Random(seed), math.log(MEAN_TOKENS) - SIGMA * SIGMA / 2
    while True:
        yield min(MOST_TOKENS, max(1, round(random.lognormvariate(mu, SIGMA))))


def mean_tokens() -> float:
    """The mean of the clipped lengths."""
    found = lengths("mean")
    return sum(next(found) for _ in range(_SAMPLE)) / _SAMPLE


def chats(load: Load, client: int) -> Iterator[Chat]:
    """The requests of one client of a load; an open loop has the client 0 only."""
    for number, tokens in enumerate(lengths(f"{load.name}-{load.seed}-{client}")):
        yield Chat(
            load, (client, number), f"{load.name}-{load.seed}-{client}-{number}. {_FILLER}", load.tokens or tokens
        )


def arrivals(load: Load, seconds: float) -> Iterator[float]:
    """The times of an open loop, in seconds from the start of the warm-up."""
    random, at = Random(f"arrivals-{load.name}-{load.seed}"), load.begin_s
    end = seconds if load.end_s is None else min(seconds, load.end_s)
    while (at := at + random.expovariate(load.rate)) < end:
        yield at


def request_bytes(chat: Chat, host: str, model: str) -> bytes:
    """The HTTP request of a chat."""
    load = chat.load
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": chat.prompt}],
        "max_tokens": chat.tokens,
    }
    if load.stream:
        body["stream"] = True
    encoded = _encode(body)
    key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n{key}{load.headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded
