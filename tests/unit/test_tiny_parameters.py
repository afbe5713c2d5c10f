"""What callers may ask of `tiny`, field by field, and that asking needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpu_pool.backends.generation import GenerationParameters, ParameterError, parse_parameters


def test_silence_means_the_defaults() -> None:
    """No parameters: greedy, 48 bytes, no stop."""
    assert parse_parameters({}) == GenerationParameters(0.0, 1.0, 48, None, ())


def test_every_field_is_taken_over() -> None:
    """All fields at once, an integer temperature included."""
    raw: dict[str, object] = {"temperature": 1, "top_p": 0.9, "max_tokens": 7, "seed": -3, "stop": ["\n", "é"]}
    assert parse_parameters(raw) == GenerationParameters(1.0, 0.9, 7, -3, ("\n", "é"))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("max_tokens", 1, 1),
        ("max_tokens", 256, 256),
        ("seed", None, None),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", -(2**63), -(2**63)),
        ("stop", None, ()),
        ("stop", "end", ("end",)),
        ("stop", ["x" * 64], ("x" * 64,)),
        ("stop", [], ()),
    ],
)
def test_the_edges_are_inside(field: str, value: object, expected: object) -> None:
    """The last value of each range is accepted."""
    assert getattr(parse_parameters({field: value}), field) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.01),
        ("temperature", 2.01),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", []),
        ("max_tokens", 0),
        ("max_tokens", 257),
        ("max_tokens", 4.0),
        ("max_tokens", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 5),
        ("stop", ["é" * 33]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("best_of", 2),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    """Unknown, wrong-typed and out-of-range values raise an error that names the field."""
    with pytest.raises(ParameterError) as caught:
        parse_parameters({field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_torch_stays_out_until_the_model_is_asked_for() -> None:
    """Importing the package and its parameters costs no torch import."""
    script = (
        "import sys, gpu_pool, gpu_pool.backends.tiny, gpu_pool.backends.generation; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
