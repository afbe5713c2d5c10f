"""The shipped weights are the pinned ones, small enough to ship, and anything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_pool.backends.tiny.model import PATH, WeightsError, load_network

CPU = torch.device("cpu")


def test_the_shipped_weights_are_the_pinned_ones_and_small() -> None:
    """The file in the package loads under its hash, in float32, and is under 8 MB."""
    network = load_network(CPU)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert 1_500_000 < sum(parameter.numel() for parameter in network.parameters()) < 3_500_000
    assert PATH.stat().st_size < 8_000_000


def test_one_changed_bit_is_refused(tmp_path: Path) -> None:
    """A file that differs in a single bit is not loaded, and the error names both hashes."""
    data = bytearray(PATH.read_bytes())
    data[-1] ^= 1
    changed = tmp_path / "tiny.safetensors"
    changed.write_bytes(data)
    with pytest.raises(WeightsError, match=r"has SHA-256 [0-9a-f]{64}, but tiny-1 was released with [0-9a-f]{64}"):
        load_network(CPU, changed)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """Absent weights are one clear sentence, not a traceback from the file system."""
    with pytest.raises(WeightsError, match="cannot be read"):
        load_network(CPU, tmp_path / "tiny.safetensors")
