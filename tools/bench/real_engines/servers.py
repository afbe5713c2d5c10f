"""Model servers on CPUs with small models: MLServer (Open Inference Protocol), infinity (embeddings), `transformers serve`."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from real_engines.model import write_directory
from real_engines.processes import MODEL, Engine, Place, free_port

REVERSE = """
from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput


class Reverse(MLModel):
    async def predict(self, payload):
        tensor = payload.inputs[0]
        texts = list(tensor.data)
        if "bad" in texts:
            raise ValueError("bad input")
        texts = [text[::-1] for text in texts]
        output = ResponseOutput(name="output", shape=tensor.shape, datatype="BYTES", data=texts)
        rows = ResponseOutput(name="rows", shape=tensor.shape, datatype="INT64", data=[len(texts)] * len(texts))
        return InferenceResponse(model_name=self.name, outputs=[output, rows])
"""
"""A model of MLServer: each text reversed, and the rows of the call."""


def _mlserver(place: Place) -> Sequence[str]:
    folder = place.home / "models"
    folder.mkdir()
    (folder / "reverse_runtime.py").write_text(REVERSE)
    text, rows = (
        {"name": name, "datatype": kind, "shape": [-1]} for name, kind in (("text", "BYTES"), ("rows", "INT64"))
    )
    model = {
        "name": place.model,
        "implementation": "reverse_runtime.Reverse",
        "inputs": [text],
        "outputs": [text, rows],
    }
    (folder / "model-settings.json").write_text(json.dumps(model))
    ports = {"http_port": place.port, "grpc_port": free_port(), "metrics_port": free_port()}
    (folder / "settings.json").write_text(json.dumps({"host": "127.0.0.1", "parallel_workers": 0, **ports}))
    return [sys.executable, "-c", "from mlserver.cli import main; main()", "start", str(folder)]


def _transformers(place: Place) -> Sequence[str]:
    # The model has the name of its folder, which is relative to the working directory of the server.
    write_directory(place.home / place.model)
    command = f"import os; os.chdir({str(place.home)!r}); from transformers.cli.transformers import main; main()"
    return [
        sys.executable,
        "-c",
        command,
        "serve",
        place.model,
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
        "--device",
        "cpu",
    ]


def _infinity(place: Place) -> Sequence[str]:
    model = write_bert(place.home / "model")
    command = [sys.executable, "-c", "from infinity_emb.cli import cli; cli()", "v2", "--model-id", str(model)]
    command += ["--served-model-name", place.model, "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    command += ["--api-key", place.key] if place.key else []
    return [*command, "--no-model-warmup", "--url-prefix", "/v1", "--host", "127.0.0.1", "--port", str(place.port)]


def write_bert(folder: Path) -> Path:
    """Write a small BERT with random weights, whose tokens are characters and whose context has 64 of them."""
    import torch  # noqa: PLC0415 - slow to import
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    folder.mkdir()
    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], [chr(code) for code in range(33, 127)]
    tokens = [*special, *letters, *(f"##{letter}" for letter in letters)]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP")}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokens), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


def _server(name: str, command: Callable[[Place], Sequence[str]], **changes: str) -> Engine:
    """A server without metrics, whose packages `make engines` installs apart."""
    environment = {"PYTHONPATH": str(Path(sys.prefix) / name), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return Engine(name, "", "", "", command, environment, **changes)


MLSERVER = _server("mlserver", _mlserver, health="/v2/health/ready", backend=f"oip:{{}}#{MODEL}")
SERVERS = {
    server.name: server for server in (MLSERVER, _server("infinity", _infinity), _server("transformers", _transformers))
}
