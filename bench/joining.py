"""Whether new requests should join between decode steps: whole batches of `tiny` beside seats that are filled as they fall free.

At saturation, so there is always somebody to join. Both ways run the same rows and must write the same texts. Whole batches
are what the product does: rows leave once they are half of the batch. Joining reads the prompts of whoever joins in a pass
of their own, while everybody else waits. What counts is the time of the processor, on one core.
"""
# ruff: noqa: INP001, SLF001 - a folder of scripts, not a package; and an experiment on the inside of the model

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from gpu_pool.backends.generation import GenerationParameters
from gpu_pool.backends.tiny.generate import TinyModel
from gpu_pool.backends.tiny.model import Cache
from gpu_pool.backends.tiny.row import TinySequence

MIXES = {"all 32": (32, 32, 0.0, 32), "8 to 64": (8, 64, 0.0, 64), "8, one of five 96": (8, 8, 0.2, 96)}
"""Tokens to write: from, to, the share of long ones, and how many those write."""


class Job(NamedTuple):
    """One request."""

    prompt: str
    wish: GenerationParameters


class Way(NamedTuple):
    """What came of one way: the texts, CPU seconds, and the mean CPU seconds until a request was done."""

    texts: list[str]
    cpu_s: float
    mean_s: float


def jobs(count: int, mix: tuple[int, int, float, int], chance: random.Random) -> list[Job]:
    """Prompts of 20 to 100 characters, drawn at temperature 1 with seeds, so that a text can be had again."""
    low, high, long_share, longest = mix
    lengths = [longest if chance.random() < long_share else chance.randint(low, high) for _ in range(count)]
    prompts = ["".join(chance.choice("etaoin shrdlu") for _ in range(chance.randint(20, 100))) for _ in range(count)]
    return [
        Job(prompt, GenerationParameters(1.0, 1.0, length, seed))
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def whole(model: TinyModel, work: Sequence[Job], seats: int) -> Way:
    """Batch after batch."""
    texts: list[str] = []
    done_at: list[float] = []
    began = time.process_time()
    for first in range(0, len(work), seats):
        part = work[first : first + seats]
        texts += [made.text for made in model.generate([job.prompt for job in part], [job.wish for job in part])]
        done_at += [time.process_time() - began] * len(part)
    return Way(texts, done_at[-1], sum(done_at) / len(done_at))


@torch.inference_mode()
def joining(model: TinyModel, work: Sequence[Job], seats: int, join_at: int) -> Way:
    """Rows keep their seats in one cache; whenever `join_at` seats are free, so many that wait take them."""
    network, context = model._network, model._network.shape.context
    cache = Cache(network.shape, seats, context, model._device)
    rows = [TinySequence.start(job.prompt, job.wish, context) for job in work]
    waiting, taken, seen = deque(rows), list[TinySequence](), set[int]()
    done_at: dict[int, float] = {}
    began = time.process_time()
    while len(done_at) < len(rows):
        free = [place for place in range(seats) if place >= len(taken) or taken[place].finished]
        if waiting and len(free) >= min(join_at, len(waiting)):
            _join(model, cache, taken, free, waiting)
        elif len(free) < seats:
            scores = model._read_last(taken, cache)
            model._draw(taken, scores)
        now = time.process_time() - began
        for row in taken:
            if row.finished and id(row) not in seen:
                seen.add(id(row))
                done_at[id(row)] = now
    return Way([row.result().text for row in rows], time.process_time() - began, sum(done_at.values()) / len(rows))


def _join(
    model: TinyModel, cache: Cache, taken: list[TinySequence], free: Sequence[int], waiting: deque[TinySequence]
) -> None:
    places = free[: len(waiting)]
    new = [waiting.popleft() for _ in places]
    own = Cache(model._network.shape, len(new), max(len(row.tokens) for row in new), model._device)
    scores = model._read_prompts(new, own)
    cache._store[:, :, torch.tensor(places), : own._store.shape[3]] = own._store
    model._draw(new, scores)
    for place, row in zip(places, new, strict=True):
        if place < len(taken):
            taken[place] = row
        else:
            taken.append(row)


def main() -> None:
    """Print the table."""
    options = _options()
    model = TinyModel.load("cpu", 1)
    table = Table(
        "tokens to write", "seats", "whole batches", "join at once", "join by quarters", "done after", box=None
    )
    for name, mix in MIXES.items():
        for seats in options.seats:
            work = jobs(options.requests, mix, random.Random(options.seed))
            whole(model, work[:seats], seats)
            ways = [whole(model, work, seats), *(joining(model, work, seats, n) for n in (1, max(1, seats // 4)))]
            if len({tuple(way.texts) for way in ways}) != 1:
                raise RuntimeError("the ways wrote different texts")
            rates = [f"{len(work) / way.cpu_s:.1f}/s" for way in ways]
            table.add_row(name, str(seats), *rates, " / ".join(f"{way.mean_s:.1f}" for way in ways) + " s")
    Console(width=110).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--seats", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
