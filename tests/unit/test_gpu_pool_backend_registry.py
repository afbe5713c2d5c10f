"""`--backend`: the message for every fault."""

import sys
from pathlib import Path

import pytest

from gpu_pool.backends.function import FunctionBackend
from gpu_pool.model_process.backend_registry import check_form, select_backend
from scheduler.errors import StartError

MODULE = """
number = 7
class Bad: pass
class Outer:
    @staticmethod
    def inner(texts): return texts
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chosen_model.py").write_text(MODULE)
    (tmp_path / "broken_model.py").write_text("raise OSError('no such disk')")
    (tmp_path / "needy_model.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("chosen_model", "broken_model", "needy_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("", "is not known; use tiny, simulated"),
        ("tiny:large", "the module 'tiny' is not found"),
        ("os:", "is not known"),
        ("../x:f", "is not known"),
        ("simulated:-1", "MS must be milliseconds"),
        ("hf:", "is not known"),
        ("openai:localhost:8000", "must begin with http:// or https://"),
        ("needy_model:f", "the module 'surely_not_installed' is not found"),
        ("broken_model:f", "importing 'broken_model' fails with OSError: no such disk"),
        ("chosen_model:Outer.missing", "has no 'Outer.missing'"),
        ("chosen_model:number", "'number' is not callable"),
        ("chosen_model:Bad", "the class needs a method predict"),
    ],
)
def test_faults_are_named(spec: str, fault: str) -> None:
    """The StartError names the part of the setting that is wrong."""
    with pytest.raises(StartError, match="Backend ") as caught:
        select_backend(spec)
    assert fault in str(caught.value)


def test_nested_names_and_form_check() -> None:
    """A name may be nested; the form check alone imports no module."""
    assert isinstance(select_backend("chosen_model:Outer.inner"), FunctionBackend)
    check_form("surely_not_there:f")
