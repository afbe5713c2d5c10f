"""Trains the weights of `tiny` and writes them as the safetensors file that the package ships.

    training/fetch_text.sh build/text
    python training/train_tiny.py --text build/text/jargon.dict.dz --out build/tiny.safetensors --minutes 35

Two idle CPU cores are enough; shared ones slow it down out of all proportion, since its threads wait for each
other. The run is seeded, but its schedule follows the clock when `--minutes` ends it before `--steps`, so two runs
give sister models rather than equal bytes. The best validation loss wins; the SHA-256 to put into
`gpu_pool/backends/tiny/model.py` is printed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_pool.backends.tiny import model
from gpu_pool.backends.tiny.model import Network, NetworkShape
from training.prepare_text import read_documents

WARM_UP = 0.02
"""Share of the run in which the learning rate rises to its peak."""


@dataclass(frozen=True)
class Plan:
    """Parameters of one run; defaults are those of the shipped weights."""

    text: Path
    out: Path
    minutes: float
    steps: int
    batch_bytes: int
    seed: int
    threads: int
    dropout: float
    every: int


def parse_plan(arguments: Sequence[str] | None = None) -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="jargon.dict.dz of Debian's dict-jargon")
    parser.add_argument("--out", type=Path, required=True, help="where the best weights go (safetensors, float16)")
    parser.add_argument("--minutes", type=float, default=35.0, help="wall time after which the run ends")
    parser.add_argument("--steps", type=int, default=100_000, help="steps after which the run ends")
    parser.add_argument("--batch-bytes", type=int, default=4096, help="bytes of text in one step")
    parser.add_argument("--seed", type=int, default=20031229)
    parser.add_argument("--threads", type=int, default=2, help="torch threads; no more than idle cores")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between validations, each of which may save")
    return Plan(**vars(parser.parse_args(arguments)))


def split_stream(documents: list[str], seed: int) -> tuple[Tensor, Tensor]:
    """Shuffle the documents and return (training, validation) token streams, one document in 40 kept for validation."""
    random.Random(seed).shuffle(documents)
    held_out = len(documents) // 40
    return _stream(documents[held_out:]), _stream(documents[:held_out])


def _stream(documents: list[str]) -> Tensor:
    tokens = [token for text in documents for token in (*text.encode(), model.END)]
    return torch.tensor(tokens, dtype=torch.long)


def draw_windows(stream: Tensor, rows: int, window: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets): random windows, each with BEGIN before it as every prompt will have."""
    starts = torch.randint(len(stream) - window, (rows, 1), generator=generator)
    targets = stream[starts + torch.arange(window)]
    begin = torch.full((rows, 1), model.BEGIN)
    return torch.cat((begin, targets[:, :-1]), dim=1), targets


def initialise(network: Network) -> None:
    """Small random matrices; what is added to the residual stream starts at zero, so each block begins as identity."""
    for name, parameter in network.named_parameters():
        if "outward" in name or "down" in name or name.startswith("scores"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.6 * parameter.shape[1] ** -0.5)


def build_optimisers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the bytes' own vectors (Jordan et al. 2024)."""
    matrices = list(network.blocks.parameters())
    vectors = [*network.embedding.parameters(), *network.scores.parameters()]
    return [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=3e-3, betas=(0.9, 0.97), weight_decay=0.01),
    ]


def learning_rate_factor(progress: float) -> float:
    """Rise over WARM_UP, hold to 40 %, then fall in a line to 1 %."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.02)
    return 1.0 if progress < 0.4 else max(0.01, (1.0 - progress) / 0.6)


def window_at(progress: float) -> int:
    """Bytes in a training window: short ones first, since attention costs less in them and early lessons are local."""
    return 128 if progress < 0.3 else 256


def loss_of(network: Network, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte; matrices multiply in bfloat16, which recent CPUs do three times as fast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = network(inputs)
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(network: Network, stream: Tensor, window: int) -> float:
    """Loss over the whole held-out stream, cut into windows."""
    network.eval()
    rows = len(stream) // window
    targets = stream[: rows * window].view(rows, window)
    inputs = torch.cat((torch.full((rows, 1), model.BEGIN), targets[:, :-1]), dim=1)
    loss = loss_of(network, inputs, targets).item()
    network.train()
    return loss


def save(network: Network, path: Path, note: dict[str, str]) -> str:
    """Write the weights as float16 and return the file's SHA-256."""
    tensors = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch, metadata=note)
    scratch.chmod(0o644)  # safetensors writes 0600, with which the next user could not read what root installed
    scratch.replace(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(plan: Plan) -> None:
    """Run until the steps or the minutes are spent, saving whenever the validation loss is the best so far."""
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    training, validation = split_stream(read_documents(plan.text), plan.seed)
    network = Network(NetworkShape(), plan.dropout)
    initialise(network)
    optimisers = build_optimisers(network)
    peaks = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {len(training):,} bytes to learn", flush=True)
    started, best, running, progress, step, digest = time.monotonic(), float("inf"), 0.0, 0.0, 0, ""
    while progress < 1.0:
        step += 1
        window = window_at(progress)
        loss = loss_of(network, *draw_windows(training, plan.batch_bytes // window, window, generator))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * learning_rate_factor(progress)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        minutes = (time.monotonic() - started) / 60
        progress = max(step / plan.steps, minutes / plan.minutes)
        if step % plan.every == 0 or progress >= 1.0:
            held_out = validate(network, validation, window)
            print(f"step {step} {minutes:.1f} min: train {running:.4f}, validation {held_out:.4f}", flush=True)
            if held_out < best:
                best = held_out
                digest = save(network, plan.out, {"steps": str(step), "validation_nats_per_byte": f"{best:.4f}"})
    print(f"best validation {best:.4f} nats a byte; sha256 {digest}")


if __name__ == "__main__":
    train(parse_plan())
