"""`tierlane check model` on real model processes: good ones, and every way to break the contract."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from integration.admin_bench import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from tierlane.check import model as check_model
from tierlane.cli import app

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
QUICK = ("--batch-sizes", "1,2,4", "--device", "cpu", "--gpu-timeout-ms", "1500", "--torch-threads", "1")
MODELS = """
import os, random, signal, time

def reverse(texts): return [t[::-1] for t in texts]
def last_missing(texts): return reverse(texts)[:-1] if len(texts) > 1 else reverse(texts)
def only_first(texts): return reverse(texts)[:1]
def by_length(texts): return reverse(sorted(texts, key=len))
def numbers(texts): return [len(t) for t in texts]
def random_words(texts): return [str(random.random()) for _ in texts]
def picky(texts):
    if any("bad" in t for t in texts): raise ValueError("bad")
    return reverse(texts)
def not_empty(texts): return [t[0] for t in texts]
def crashes(texts): os.kill(os.getpid(), signal.SIGKILL)
def crashes_on_long(texts):
    if max(map(len, texts)) > 10_000: os.kill(os.getpid(), signal.SIGKILL)
    return reverse(texts)
def hangs(texts): time.sleep(60)
def holds_two(texts):
    if len(texts) == 4: raise MemoryError
    return reverse(texts)
class NeverLoads:
    def load(self): time.sleep(60)
    def predict(self, texts): return texts
class CannotLoad:
    def load(self): raise OSError("weights are not readable")
    def predict(self, texts): return texts
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of models that only model processes can import."""
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def check(spec: str, *options: str) -> Result:
    name = spec if ":" in spec or spec == "tiny" else f"checked_models:{spec}"
    arguments = ["check", "model", name, *QUICK, *options]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"TIERLANE_DATA_DIR": "/nonexistent"})


async def marks(spec: str, *options: str) -> tuple[int, dict[str, bool | None], dict[str, Any]]:
    """Exit code, mark by check, and the whole document."""
    result = await check(spec, *options, "-o", "json")
    told = json.loads(result.stdout)
    return result.exit_code, {each["name"]: each["ok"] for each in told["checks"]}, told


async def test_a_good_model_passes_and_gets_its_settings() -> None:
    """A time that does not depend on the size asks for the largest batch."""
    code, found, told = await marks("simulated:5")

    assert code == 0
    assert set(found.values()) == {True, None}
    assert [one["size"] for one in told["sizes"]] == [1, 2, 4]
    assert all(5 <= one["p50_ms"] < 100 for one in told["sizes"])
    assert told["suggestion"]["max_batch_size"] == 4
    assert told["version"] == "simulated-5ms"


async def test_tiny_passes() -> None:
    """The model that ships with the project keeps its own contract."""
    code, found, told = await marks("tiny", "--max-tokens", "4")

    assert (code, [name for name, ok in found.items() if ok is False]) == (0, [])
    assert found["order"] is True
    assert len(told["sizes"]) == 3


@pytest.mark.parametrize(
    ("spec", "crosses"),
    [
        ("last_missing", {"length", "sizes"}),
        ("only_first", {"length", "sizes"}),
        ("by_length", {"order"}),
        ("numbers", {"type", "empty", "unicode", "long", "isolation", "sizes"}),
        ("random_words", {"determinism"}),
        ("not_empty", {"empty"}),
        ("crashes_on_long", {"long"}),
        ("holds_two", {"sizes"}),
        ("crashes", {"answers"}),
        ("hangs", {"answers"}),
        ("CannotLoad", {"load"}),
        ("no_such_name", {"load"}),
    ],
)
async def test_what_breaks_the_contract_is_told(spec: str, crosses: set[str]) -> None:
    """Each has its own crosses, and exit code 1; none takes the check along."""
    code, found, told = await marks(spec)

    assert {name for name, ok in found.items() if ok is False} == crosses
    assert (code, told["ok"]) == (1, False)
    assert all(each["advice"] for each in told["checks"] if each["ok"] is False)


async def test_a_model_that_never_loads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that is allowed for it."""
    monkeypatch.setattr(check_model, "LOAD_TIMEOUT_S", 0.5)

    code, found, told = await marks("NeverLoads")

    assert (code, found) == (1, {"load": False})
    assert told["checks"][0]["said"] == "The model did not load within 0.5 s."


async def test_a_bad_input_fails_alone() -> None:
    """The one that is named, or one that the model was seen to raise on."""
    assert (await marks("picky", "--poison", "a bad one"))[1]["isolation"] is True
    assert (await marks("not_empty"))[1]["isolation"] is True
    assert (await marks("reverse", "--poison", "harmless"))[1]["isolation"] is None


async def test_it_is_told_to_people() -> None:
    """Marks, advice, times, and no row where something is wrong."""
    shown = await check("by_length")

    assert shown.exit_code == 1
    assert "  ✗ order        input 1 got the answer of input 3" in shown.stdout
    assert "Put the answers back into the order of the inputs" in shown.stdout
    assert "max_batch_size" in shown.stdout


async def test_the_suggestion_is_written_as_an_admin_would(database_url: str, db: Connection) -> None:
    """Into the row of the model, under the actor's name; not where a check failed, nor where there is no such model."""
    admin = Admin(database_url)
    await admin.done("model", "create", "mine")
    options = (*QUICK, "--write", "mine", "--actor", "kim")

    said = await admin.done("check", "model", "simulated:5", *options)

    row = await db.fetchrow("SELECT max_batch_size, max_wait_ms FROM models WHERE name = 'mine'")
    actors = await db.fetch(
        "SELECT DISTINCT changed_by FROM config_changes WHERE table_name = 'models' AND row_key = 'mine'"
    )
    assert row["max_batch_size"] == 4
    assert 4 <= row["max_wait_ms"] <= 40
    assert "kim" in {record["changed_by"] for record in actors}
    assert "model mine: changed" in said

    refused = await admin.run("check", "model", "checked_models:by_length", *options)
    absent = await admin.run("check", "model", "simulated:0", *QUICK, "--write", "absent")
    assert (refused.exit_code, absent.exit_code) == (1, 1)
    assert "Nothing was written to model mine" in refused.stdout
    assert "There is no model named absent." in absent.stderr
    assert await db.fetchval("SELECT max_batch_size FROM models WHERE name = 'mine'") == 4
