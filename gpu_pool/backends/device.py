"""The device of a model that runs in torch. Imports torch, so backends import this module when they load."""

import torch

from scheduler.errors import StartError


def select_device(name: str) -> torch.device:
    """The device that TIERLANE_DEVICE names: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA if available).

    Raises StartError for a GPU that torch does not find.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        found = ", ".join(f"cuda:{number}" for number in range(count)) or "no GPU"
        raise StartError(
            f"TIERLANE_DEVICE={name}: torch finds {found}. Set TIERLANE_DEVICE to auto, cpu or a GPU that torch finds; "
            "the driver, CUDA_VISIBLE_DEVICES and the build of torch limit these."
        )
    return device
