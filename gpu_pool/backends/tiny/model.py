"""The network, the weights and the vocabulary of `tiny`.

A decoder transformer over bytes (RoPE, RMSNorm, squared ReLU), and its KV cache. The same `forward` trains (no cache:
whole windows) and generates (with a cache: each row has its own position). Rows start at slot 0
of the cache and are padded on the right, so a real token never has padding before it, and the only mask is "the own
slot and the nearest ones before it".

The weights are safetensors, which cannot contain code. Their hash is compared before anything is parsed, so a damaged
or replaced file is rejected. The token ids are the 256 byte values, then three marks: there is no tokenizer, a prompt's
tokens are its UTF-8 bytes.
"""

from __future__ import annotations

import hashlib
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

BEGIN: Final = 256
"""Comes before every text, so that an empty prompt has a token."""
END: Final = 257
"""The model's mark for the end of a text."""
PAD: Final = 258
"""Fills the shorter rows of a batch; never learned from, never drawn."""
VOCABULARY_SIZE: Final = 259

VERSION: Final = "tiny-1"
SHA256: Final = "96a25fd5bbf8a2cb969b2e377f809f0efa72260f476aa611d9fe0d5a6fff5383"
PATH: Final = Path(__file__).with_name("tiny.safetensors")


def encode(prompt: str, keep: int) -> list[int]:
    """BEGIN and the last `keep` bytes of the prompt, cut at a character's start; lone surrogates become `?`."""
    data = prompt.encode("utf-8", errors="replace")
    tail = data[-keep:].lstrip(bytes(range(0x80, 0xC0))) if len(data) > keep else data
    return [BEGIN, *tail]


def decode(tokens: Iterable[int]) -> str:
    """The text of byte tokens: bad bytes become U+FFFD, a partial character at the very end is left out."""
    return decoder().decode(bytes(tokens), final=False)


def decoder() -> IncrementalDecoder:
    """An incremental decoder that gives the same text piece by piece."""
    return getincrementaldecoder("utf-8")("replace")


@dataclass(frozen=True)
class NetworkShape:
    """The sizes of the network.

    `window` is how many tokens back each layer attends to, its own included. Positions enter only as distances, and
    none is longer than in training, so text at the end of the context is as good as at its start.
    """

    context: int = 512
    window: int = 128
    width: int = 192
    layers: int = 6
    heads: int = 6
    hidden: int = 768

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


@dataclass
class TokenPositions:
    """Positions of the tokens of one call: their angles and, with a cache, their slots and what they may attend to."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    mask: Tensor
    cache: Cache | None
    first: int = 0


class Cache:
    """Keys and values of every layer for every row; it grows as needed."""

    def __init__(self, shape: NetworkShape, device: torch.device) -> None:
        self._shape = shape
        self._store = torch.zeros(shape.layers, 2, 0, 0, shape.heads, shape.head_width, device=device)

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for so many rows of so many tokens."""
        before = self._store
        had_rows, had_slots = before.shape[2:4]
        if rows > had_rows or slots > had_slots:
            # Twice as much as before, so that most of the time there is room.
            more_rows = max(rows, 2 * had_rows) if rows > had_rows else had_rows
            more_slots = min(max(slots, 2 * had_slots), self._shape.context) if slots > had_slots else had_slots
            self._store = before.new_zeros((*before.shape[:2], more_rows, more_slots, *before.shape[4:]))
            self._store[:, :, :had_rows, :had_slots] = before

    def write(self, layer: int, place: TokenPositions, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `keys` and `values` (rows, heads, tokens, head width) in each row's slots; returns all within reach."""
        store = self._store[layer, :, place.first : place.first + keys.shape[0]]
        rows = torch.arange(keys.shape[0], device=keys.device).unsqueeze(1)
        store[0][rows, place.positions] = keys.transpose(1, 2)
        store[1][rows, place.positions] = values.transpose(1, 2)
        reach = place.mask.shape[-1]
        return store[0, :, :reach].transpose(1, 2), store[1, :, :reach].transpose(1, 2)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a row to another row."""
        self._store[:, :, target, :tokens] = self._store[:, :, source, :tokens]


def rope_table(shape: NetworkShape) -> tuple[Tensor, Tensor]:
    """Cos and sin of the rotary embedding (Su et al. 2021), each (context, head width / 2)."""
    half = shape.head_width // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head vector by its position's angles."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(heads)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain: the linear layer behind it learns the scale."""
    return functional.rms_norm(x, (x.shape[-1],))


def nothing() -> None:
    """The default callback: does nothing."""


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inward = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.outward = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, place: TokenPositions, layer: int) -> Tensor:
        """Attend from each token to those before it, in the window itself or in the cache."""
        rows, tokens, width = x.shape
        mixed = self.inward(x).view(rows, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        queries = rotate(norm(queries), place.cos, place.sin)
        keys = rotate(norm(keys), place.cos, place.sin)
        if place.cache is not None:
            keys, values = place.cache.write(layer, place, keys, values)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=place.mask)
        return cast("Tensor", self.outward(seen.transpose(1, 2).reshape(rows, tokens, width)))


class Block(nn.Module):
    """One layer: attention, then a two-matrix perceptron, each added to what came in."""

    def __init__(self, shape: NetworkShape, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, place: TokenPositions, layer: int) -> Tensor:
        """Return x after both residual steps."""
        x = x + self.dropout(self.attention(norm(x), place, layer))
        lifted = functional.relu(self.up(norm(x))).square()
        return x + cast("Tensor", self.dropout(self.down(lifted)))


class Network(nn.Module):
    """Bytes in, a score for each possible next byte out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: NetworkShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY_SIZE, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.scores = nn.Linear(shape.width, VOCABULARY_SIZE, bias=False)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score whole windows (rows, tokens) that start at position 0; returns (rows, tokens, vocabulary)."""
        return cast("Tensor", self.scores(self.hidden(tokens)))

    def hidden(self, tokens: Tensor, on_layer: Callable[[], None] = nothing) -> Tensor:
        """The last layer's state for each token of such windows; returns (rows, tokens, width)."""
        reach = tokens.shape[1]
        positions = torch.arange(reach, device=tokens.device)
        place = TokenPositions(self.cos[:reach], self.sin[:reach], positions, self._visible(positions, reach), None)
        return norm(self._through(tokens, place, on_layer))

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reach: int,
        cache: Cache,
        last: Tensor,
        *,
        first: int = 0,
        on_layer: Callable[[], None] = nothing,
    ) -> Tensor:
        """Score the token after each row's `last` one, with the cached tokens before.

        `tokens` and `positions` are (rows, tokens) of the cache's rows from `first` on; `reach` is the number of cache
        slots within reach; `last` (rows) indexes each row's last real token within this call; `on_layer` is called
        after each layer. Returns (rows, vocabulary).
        """
        mask = self._visible(positions, reach).unsqueeze(1)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self._through(tokens, TokenPositions(cos, sin, positions, mask, cache, first), on_layer)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return cast("Tensor", self.scores(norm(x[rows, last])))

    def _visible(self, positions: Tensor, reach: int) -> Tensor:
        """Which of the first `reach` slots each position may attend to: its own and those before it, within the window."""
        behind = positions.unsqueeze(-1) - torch.arange(reach, device=positions.device)
        return (behind >= 0) & (behind < self.shape.window)

    def _through(self, tokens: Tensor, place: TokenPositions, on_layer: Callable[[], None]) -> Tensor:
        x = norm(self.embedding(tokens))
        for layer, block in enumerate(self.blocks):
            x = block(x, place, layer)
            on_layer()
        return x


class WeightsError(RuntimeError):
    """The weights file is missing or not the one of this version."""


def load_network(device: torch.device, path: Path = PATH, sha256: str = SHA256) -> Network:
    """The network with the weights at `path`, in float32 and ready to generate.

    Raises `WeightsError` if the file is missing or its SHA-256 is not `sha256`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read ({error.strerror}); install Tierlane again.") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise WeightsError(
            f"{path.name} has SHA-256 {found}, but {VERSION} was released with {sha256}; install Tierlane again."
        )
    tensors = {name: tensor.float() for name, tensor in load(data).items()}
    network = Network(NetworkShape())
    network.load_state_dict(tensors)
    return network.to(device).eval().requires_grad_(requires_grad=False)
