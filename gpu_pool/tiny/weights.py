"""The weights that ship with `tiny`: where they lie, the hash that pins them, and loading them safely.

safetensors holds numbers and nothing that can run. The hash is compared before a byte is parsed, so a damaged or
swapped file is refused instead of answering with other text under the same version.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load

from gpu_pool.backends.tiny.model import Network, Shape

VERSION: Final = "tiny-1"
SHA256: Final = "96a25fd5bbf8a2cb969b2e377f809f0efa72260f476aa611d9fe0d5a6fff5383"
PATH: Final = Path(__file__).with_name("tiny.safetensors")


class WeightsError(RuntimeError):
    """The weights file is missing or is not the one this version was released with."""


def load_network(device: torch.device, path: Path = PATH, sha256: str = SHA256) -> Network:
    """Return the network, in float32 and ready to generate, with the weights at `path`.

    Raises `WeightsError` when the file is missing or its SHA-256 is not `sha256`.
    """
    tensors = {name: tensor.float() for name, tensor in load(_read_verified(path, sha256)).items()}
    network = Network(Shape())
    network.load_state_dict(tensors)
    return network.to(device).eval().requires_grad_(requires_grad=False)


def _read_verified(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read ({error.strerror}); install Tierlane again.") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise WeightsError(
            f"{path.name} has SHA-256 {found}, but {VERSION} was released with {sha256}; install Tierlane again."
        )
    return data
