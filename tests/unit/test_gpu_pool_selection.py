"""`--backend`: every form is understood, every fault is named."""

import sys
from pathlib import Path

import pytest

from gpu_pool.backends.backend import Backend
from gpu_pool.backends.function import FunctionBackend
from gpu_pool.backends.hf.backend import HfBackend
from gpu_pool.backends.openai_endpoint.backend import EndpointBackend
from gpu_pool.backends.simulated import SimulatedBackend
from gpu_pool.backends.tiny.backend import TinyBackend
from gpu_pool.model_process.backend_registry import check_form, select_backend
from scheduler.errors import StartError

MODULE = """
number = 7
def reverse(texts): return [t[::-1] for t in texts]
class Good:
    def predict(self, texts): return texts
class Bad: pass
class Outer:
    @staticmethod
    def inner(texts): return texts
"""


@pytest.fixture
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chosen_model.py").write_text(MODULE)
    (tmp_path / "broken_model.py").write_text("raise OSError('no such disk')")
    (tmp_path / "needy_model.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("chosen_model", "broken_model", "needy_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("tiny", TinyBackend),
        ("hf:models/mine", HfBackend),
        ("hf:/models/my model: the second", HfBackend),
        ("simulated", SimulatedBackend),
        ("simulated:0", SimulatedBackend),
        ("simulated:12.5", SimulatedBackend),
        ("openai:http://localhost:8000/v1#model", EndpointBackend),
        ("chosen_model:reverse", FunctionBackend),
        ("chosen_model:Good", FunctionBackend),
        ("chosen_model:Outer.inner", FunctionBackend),
    ],
)
def test_known_forms(spec: str, kind: type[Backend]) -> None:
    """Each form of the contract gives its backend."""
    backend = select_backend(spec)

    assert isinstance(backend, kind)
    backend.close()


@pytest.mark.parametrize(("spec", "version"), [("simulated", "simulated-50ms"), ("simulated:7.5", "simulated-7.5ms")])
def test_the_simulated_time_is_50_ms_unless_given(spec: str, version: str) -> None:
    """The version of the simulated model tells its time."""
    assert version == select_backend(spec).version


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("", "is not known; use tiny, simulated"),
        ("Tiny", "is not known"),
        ("tiny:large", "the module 'tiny' is not found"),
        ("os", "is not known"),
        ("os.path", "is not known"),
        ("os:", "is not known"),
        (":f", "is not known"),
        ("../x:f", "is not known"),
        ("simulated:", "MS must be a number"),
        ("simulated:fast", "MS must be a number"),
        ("simulated:-1", "MS must be a number"),
        ("hf:", "is not known"),
        ("openai:localhost:8000", "must begin with http:// or https://"),
        ("openai:http://", "the URL names no host"),
        ("surely_not_there:f", "the module 'surely_not_there' is not found"),
        ("needy_model:f", "the module 'surely_not_installed' is not found"),
        ("broken_model:f", "importing 'broken_model' fails with OSError: no such disk"),
        ("chosen_model:missing", "the module 'chosen_model' has no 'missing'"),
        ("chosen_model:Outer.missing", "has no 'Outer.missing'"),
        ("chosen_model:number", "'number' is not callable"),
        ("chosen_model:Bad", "the class needs a method predict"),
    ],
)
def test_every_fault_is_named(spec: str, fault: str) -> None:
    """One sentence says what is wrong with the setting."""
    with pytest.raises(StartError, match="Backend ") as caught:
        select_backend(spec)
    assert fault in str(caught.value)


def test_a_supervisor_checks_the_form_without_importing_the_module() -> None:
    """A model's module is imported in the model process only."""
    check_form("surely_not_there:f")
