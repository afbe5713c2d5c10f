"""The description of a model by its server: tensors, whether requests may be joined, and the tasks. No I/O.

The metadata of the protocol do not name optional inputs and the size of a batch; the configuration that Triton shows does.
"""

import re
from collections.abc import Sequence

import msgspec

from gpu_pool.backends.backend import InvalidOutput
from scheduler.payload import Task

BYTES = "BYTES"
MOST_ROWS = 32
"""The most rows of one call, if the server names no maximum."""
CALLS = 2
"""Calls at a time whose requests may be joined: one that runs and one that waits in the server."""
_NUMBERS = re.compile(r"U?INT(8|16|32|64)|FP(16|32|64)|BF16")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor; -1 is a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"`{self.name}` ({self.datatype} {list(self.shape)})"


class ModelSpec(msgspec.Struct, frozen=True):
    """A model. `inputs` is empty if the server does not describe it.

    `most_rows`: of one call with several requests, 0 if they must not be joined; `calls`: such calls at a time.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    optional: frozenset[str] = frozenset()
    most_rows: int = 0
    calls: int = CALLS

    @property
    def tasks(self) -> frozenset[Task]:
        """A text input also takes chats; with one output of numbers its model makes embeddings."""
        needed = [each for each in self.inputs if each.name not in self.optional] or self.inputs[:1]
        if self.inputs and (len(needed) != 1 or needed[0].datatype != BYTES):
            return frozenset({Task.COMPLETE})
        vectors = len(self.outputs) == 1 and _NUMBERS.fullmatch(self.outputs[0].datatype)
        return frozenset({Task.COMPLETE, Task.CHAT, *([Task.EMBED] if vectors else [])})


class _Metadata(msgspec.Struct):
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None


class _ConfigInput(msgspec.Struct):
    name: str
    optional: bool = False


class _Instances(msgspec.Struct):
    count: int = 1
    gpus: Sequence[int] = ()


class _Config(msgspec.Struct):
    max_batch_size: int
    input: list[_ConfigInput] = []
    instance_group: list[_Instances] = []


_metadata = msgspec.json.Decoder(_Metadata)
_config = msgspec.json.Decoder(_Config)


def read_model(metadata: bytes, config: bytes) -> ModelSpec:
    """The model of these metadata and this configuration, b"" without one. Raises InvalidOutput."""
    try:
        found = _metadata.decode(metadata)
    except UNREADABLE:
        raise InvalidOutput("The server's metadata of the model cannot be read.") from None
    inputs, outputs = found.inputs or (), found.outputs or ()
    try:
        seen = _config.decode(config)
    except UNREADABLE:
        # The first dimension is one of rows, but in a vector of numbers it may be the vector's length.
        of_rows = (each.shape[:1] == (-1,) and (len(each.shape) > 1 or each.datatype == BYTES) for each in inputs)
        return ModelSpec(inputs, outputs, most_rows=MOST_ROWS if inputs and all(of_rows) else 0)
    optional = frozenset(each.name for each in seen.input if each.optional)
    instances = sum(each.count * max(1, len(each.gpus)) for each in seen.instance_group)
    return ModelSpec(inputs, outputs, optional, max(0, seen.max_batch_size), max(1, instances) + 1)
