"""How large a full batch is where nobody says: what a model can do in one go without making its first member wait."""

TINY_BATCH_SIZE = 8  # On a CPU core; a GPU takes many times as much.
BATCH_SIZE = 32


def default_batch_size(backend: str) -> int:
    """The size for the backend of `--backend`."""
    return TINY_BATCH_SIZE if is_tiny(backend) else BATCH_SIZE


def is_tiny(backend: str) -> bool:
    """Whether it is the small model that ships with the project."""
    return backend.partition(":")[0] == "tiny"
