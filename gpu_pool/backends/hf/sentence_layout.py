"""The sentence-transformers layout of a model directory: `modules.json` names the steps from tokens to a vector.

A Transformer, pooling by mean or by the first token, and Normalize are supported; any other step is rejected by name,
since leaving it out would give another vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gpu_pool.backends.hf.json_file import Unusable, read_json, read_object

Pooling = Literal["mean", "cls"]
_MODES: Final[dict[str, Pooling]] = {
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True)
class SentenceLayout:
    """The folder of the transformer, its pooling, and the most tokens of a text (None: the model's limit)."""

    folder: Path
    pooling: Pooling
    max_tokens: int | None
    lower_case: bool


def read_layout(path: Path) -> SentenceLayout | None:
    """The layout, or None without `modules.json`. Raises Unusable."""
    if not (path / "modules.json").exists():
        return None
    modules = read_json(path / "modules.json")
    try:
        named = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in modules]
    except (TypeError, KeyError, AttributeError):
        raise Unusable("modules.json is no list of modules") from None
    for kind, folder in named:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise Unusable(f"its module {kind} is not supported: Transformer, Pooling and Normalize are")
        if not (path / folder).resolve().is_relative_to(path.resolve()):
            raise Unusable(f"modules.json names the folder {folder!r}, which is outside of it")
    folders = {kind: path / folder for kind, folder in named}
    if "Transformer" not in folders or "Pooling" not in folders:
        raise Unusable("modules.json does not name a Transformer and its Pooling")
    config = read_object(folders["Pooling"] / "config.json")
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if "pooling_mode" in config:  # The newer format.
        wanted = [str(config["pooling_mode"])]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise Unusable(f"its pooling ({', '.join(wanted) or 'none'}) is not supported: mean and cls are")
    settings_file = folders["Transformer"] / "sentence_bert_config.json"
    settings = read_object(settings_file) if settings_file.is_file() else {}
    longest = settings.get("max_seq_length")
    return SentenceLayout(
        folders["Transformer"],
        _MODES[wanted[0]],
        longest if isinstance(longest, int) and longest > 0 else None,
        bool(settings.get("do_lower_case", False)),
    )
